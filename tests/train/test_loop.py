"""The training loop: a killed run continues as if nothing had happened (law 5)."""

from __future__ import annotations

import dataclasses
import random
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.data import packing
from m2jax.observe import compiling
from m2jax.observe import metrics as metrics_lib
from m2jax.optim import OptimizerConfig
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import loop, stopping
from m2jax.train import step as train_step
from tests import quick
from tests.train import test_step

CFG = dataclasses.replace(
  test_step.CFG, dtype='float32', param_dtype='float32', num_mtp_modules=0
)


class Killed(BaseException):
  """Stands for SIGKILL: nothing in the loop may catch it."""


def samples():
  rng = np.random.default_rng(0)
  return [forest.Sample(rng.integers(1, 19, rng.integers(3, 9)), 1) for _ in range(11)]


def groups():
  return [[sample] for sample in samples()]


def batches(state):
  return packing.SampleBatches(groups(), tokens_per_batch=20, seed=3, state=state)


def to_forest(batch):
  return forest.merge(batch, row_tokens=24, rows=1, row_terms=24)


def fit(workdir, state, step, config, make_batches=batches, **more):
  """One life of a run in `workdir`."""
  with (
    CheckpointManager(workdir / 'checkpoints') as manager,
    metrics_lib.MetricsWriter(workdir, use_tensorboard=False) as metrics,
  ):
    return loop.fit(
      state,
      step,
      make_batches,
      to_forest,
      config,
      loop.Run('sft', manager, metrics, **more),
    )


def dying(step, at: int):
  """`step`, which dies instead of taking its `at`-th step from now."""
  left = at

  def wrapped(state, batch):
    nonlocal left
    left -= 1
    if left == 0:
      raise Killed
    return step(state, batch)

  return wrapped


@pytest.mark.parametrize('name', ['adam', pytest.param('sso', marks=pytest.mark.long)])
def test_resume_is_bit_identical(tmp_path, name):
  """Twice killed between checkpoints, the run ends with the parameters, optimizer and
  data position of the run that was never killed, and with its metrics, each step
  once. SSO's power iteration continues from its vectors."""
  optimizer = optimizer_lib.make(OptimizerConfig(name=name), CFG)
  config = train_step.StepConfig(micro_rows=1, bias_update_rate=1e-2)
  step = train_step.make_step(CFG, optimizer, train_step.nll, config)
  budget = loop.LoopConfig(steps=9, checkpoint_every=2, log_every=1)

  def start():
    return train_step.init_state(quick.variables(CFG, 0), optimizer)

  whole = fit(tmp_path / 'whole', start(), step, budget)
  with pytest.raises(Killed):  # in the step after the checkpoint of step 4
    fit(tmp_path / 'killed', start(), dying(step, 5), budget)
  with pytest.raises(Killed):  # in step 8, one after the checkpoint of step 6
    fit(tmp_path / 'killed', start(), dying(step, 4), budget)
  resumed = fit(tmp_path / 'killed', start(), step, budget)
  assert int(resumed.step) == 9
  for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(a, b)

  def left_by(name):
    with CheckpointManager(tmp_path / name / 'checkpoints', read_only=True) as manager:
      host = manager.restore(like=whole).host
    return host['data'], [
      (r['step'], r['loss'], r['grad_norm']) for r in metrics_lib.read(tmp_path / name)
    ]

  assert left_by('killed') == left_by('whole')
  assert [step for step, *_ in left_by('whole')[1]] == list(range(1, 10))


def counter(value=0.0):
  """A train state small enough that the loop itself is what is tested."""
  return train_step.TrainState(
    jnp.zeros((), jnp.int32), {'params': {'w': jnp.float32(value)}}, ()
  )


def count(state, batch):
  """Adds 1 to w; the loss is w."""
  del batch
  w = state.variables['params']['w']
  metrics = {'loss': w, 'grad_norm': jnp.float32(1.0), 'skipped': jnp.float32(0.0)}
  new = {'params': {'w': w + 1}}
  return train_step.TrainState(state.step + 1, new, ()), metrics


def finite(epochs):
  return lambda state: packing.SampleBatches(
    groups(), tokens_per_batch=20, seed=3, epochs=epochs, state=state
  )


def number_of_batches(epochs) -> int:
  return len(list(finite(epochs)(None)))


@pytest.mark.parametrize('offset', [0, 1])
def test_end_of_the_data(tmp_path, offset):
  """When the data end before the budget, the last step has its checkpoint, also where
  its regular one is still being written; another start then changes nothing."""
  n = number_of_batches(2)
  budget = loop.LoopConfig(steps=1000, checkpoint_every=n - offset, log_every=1)
  for _ in range(2):
    state = fit(tmp_path, counter(), count, budget, finite(2))
    assert int(state.step) == float(state.variables['params']['w']) == n
  with CheckpointManager(tmp_path / 'checkpoints', read_only=True) as manager:
    assert manager.latest_step() == n
  steps = [r['step'] for r in metrics_lib.read(tmp_path)]
  assert steps == list(range(1, n + 1))


def test_budget_of_a_finished_run(tmp_path):
  """A finished run started again takes no step; with a larger budget it goes on."""
  for steps, want in ((3, 3), (3, 3), (5, 5)):
    budget = loop.LoopConfig(steps=steps, checkpoint_every=10)
    state = fit(tmp_path, counter(), count, budget)
    assert float(state.variables['params']['w']) == want


def test_seconds_count_over_restarts(tmp_path, monkeypatch):
  """The time budget is of training, restarts included: what was spent up to the
  checkpoint counts, what was lost after it does not."""

  class Clock:
    now_s = 100.0

    def monotonic(self):
      return self.now_s

  clock = Clock()
  monkeypatch.setattr(loop, 'time', clock)
  monkeypatch.setattr(loop.compiling, 'seconds', lambda: 0.0)

  def slow(state, batch):
    clock.now_s += 1.0
    return count(state, batch)

  budget = loop.LoopConfig(steps=1000, seconds=7.0, checkpoint_every=2)
  with pytest.raises(Killed):
    fit(tmp_path, counter(), dying(slow, 6), budget)  # five steps, checkpoint of four
  clock.now_s += 1e6  # a night passes
  state = fit(tmp_path, counter(), slow, budget)
  assert int(state.step) == 7


def test_compilation_is_outside_the_budget(tmp_path):
  """A budget of seconds is of training: a slow compiler took 20 s of SFT for itself."""

  new = random.random()  # so that the program is in no cache, whatever ran before

  @jax.jit
  def compiles(x):
    for _ in range(300):  # each a new operation to the compiler, which recurses
      x = jnp.sin(x) @ x
    return x + new

  def step(state, batch):
    if int(state.step) == 0:
      jax.block_until_ready(compiles(jnp.eye(8)))
    return count(state, batch)

  started, before = time.monotonic(), compiling.seconds()
  budget = loop.LoopConfig(steps=3, seconds=1e6, checkpoint_every=3, log_every=1)
  fit(tmp_path, counter(), step, budget)
  took_s, compiled_s = time.monotonic() - started, compiling.seconds() - before
  used_s = metrics_lib.read(tmp_path, 'sft')[-1]['used_s']
  assert compiled_s > 0.1
  assert used_s <= took_s - compiled_s


def skipping(bad):
  """`count`, whose steps `bad` are skipped."""

  def step(state, batch):
    new, metrics = count(state, batch)
    if int(new.step) not in bad:
      return new, metrics
    metrics |= {'loss': jnp.float32(jnp.nan), 'skipped': jnp.float32(1.0)}
    return dataclasses.replace(new, variables=state.variables), metrics

  return step


def test_steps_that_are_not_finite(tmp_path):
  """Up to a number of them in a row are skipped. One more ends the run with a
  checkpoint of the last good weights, and the same command goes on behind their
  batches: else every restart would meet them again."""
  budget = loop.LoopConfig(steps=12, checkpoint_every=4, log_every=2, max_skipped=2)
  step = skipping({3, 4, 7, 8, 9})
  with pytest.raises(train_step.NotFinite, match='sft step 1[01]: .* in a row'):
    fit(tmp_path, counter(), step, budget)
  with CheckpointManager(tmp_path / 'checkpoints', read_only=True) as manager:
    stopped = manager.latest_step()
    assert manager.restore().state['variables']['params']['w'] == stopped - 5
  state = fit(tmp_path, counter(), step, budget)
  assert float(state.variables['params']['w']) == 12 - 5
  skipped = {r['step']: r['skipped'] for r in metrics_lib.read(tmp_path, 'sft')}
  assert skipped[4] == 2 and skipped[6] == 0 and sum(skipped.values()) == 5


@pytest.mark.parametrize('number', [1, 2])
def test_sigterm_saves_at_the_step_boundary(tmp_path, monkeypatch, number):
  """The first SIGTERM ends the run after the step, with a checkpoint of it, and the
  same command trains what is left; the second interrupts at once. Outside a loop there
  is nothing to save, and the first one does."""
  monkeypatch.setattr(stopping, '_requested', False)
  previous = signal.signal(signal.SIGTERM, stopping.on_signal)

  def step(state, batch):
    state, metrics = count(state, batch)
    if int(state.step) == 3:
      for _ in range(number):
        signal.raise_signal(signal.SIGTERM)
    return state, metrics

  budget = loop.LoopConfig(steps=8, checkpoint_every=100)
  try:
    with pytest.raises(KeyboardInterrupt):
      fit(tmp_path, counter(), step, budget)
    stopping.forget()
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGTERM)
  finally:
    signal.signal(signal.SIGTERM, previous)
    stopping.forget()
  with CheckpointManager(tmp_path / 'checkpoints', read_only=True) as manager:
    assert manager.latest_step() == (3 if number == 1 else None)
  state = fit(tmp_path, counter(), count, budget)
  assert float(state.variables['params']['w']) == 8


def test_permanent_checkpoints(tmp_path):
  """`keep_every_steps` reaches the manager's rule: see the jobs' mains."""
  with CheckpointManager(tmp_path, keep=1, keep_every_steps=2) as manager:
    for number in range(1, 6):
      manager.save(number, {'x': np.zeros(1)})
    manager.wait()
    assert manager.steps() == [2, 4, 5]


def test_host_and_files(tmp_path):
  """What the caller wants in every checkpoint is in there beside the loop's own."""
  budget = loop.LoopConfig(steps=2)
  fit(tmp_path, counter(), count, budget, host={'note': 'x'}, files={'a.txt': b'y'})
  with CheckpointManager(tmp_path / 'checkpoints', read_only=True) as manager:
    restored = manager.restore()
  assert restored.host['note'] == 'x' and set(restored.host) > {'data', 'used_s'}
  assert restored.files == {'a.txt': b'y'}


def test_records(tmp_path):
  """Every `log_every`-th step and the last leave a record with their own values."""
  budget = loop.LoopConfig(steps=8, log_every=3)
  fit(tmp_path, counter(), count, budget)
  records = metrics_lib.read(tmp_path)
  assert [(r['step'], r['loss']) for r in records] == [(3, 2.0), (6, 5.0), (8, 7.0)]
  assert records[-1]['progress'] == 1.0


def test_processes_agree_on_the_end(monkeypatch):
  """Several processes end after the same step: each votes after every step, and they
  read the vote one step later. On CPUs it begins once the step has ended. The limit of
  steps needs no vote. A request to stop in one is one in all."""
  monkeypatch.setattr(stopping, '_requested', False)
  events = []

  class Step:
    def block_until_ready(self):
      events.append('step')

  def largest(mine):
    events.append(mine)
    return jnp.int32(others)

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(loop, 'largest', largest)
  others = 1
  end = loop._End(loop.LoopConfig(steps=10, seconds=5.0))
  assert not end.reached(1, 1.0, Step()) and end.reached(2, 6.0, Step())
  assert events == ['step', 0, 'step', 1]
  assert end.reached(10, 0.0, Step()) and len(events) == 4
  assert not stopping.requested()
  others = 2
  end = loop._End(loop.LoopConfig(steps=10))
  assert not end.reached(1, 1.0, Step()) and end.reached(2, 1.0, Step())
  assert stopping.requested()
