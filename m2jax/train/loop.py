"""The training loop over an iterator of batches: pre-training and SFT.

Metrics of step N−1 are fetched while step N runs. A checkpoint has the train state, the
data position and the time used, so a killed run continues with exactly the next batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forest import Forest
from m2jax.observe import compiling, progress
from m2jax.observe.metrics import MetricsWriter
from m2jax.train import stopping
from m2jax.train.step import Skips, Step, TrainState, fetch


class Batches(Protocol):
  """An iterator of batches whose whole position is `state()`, a JSON-able dict."""

  def __iter__(self) -> Iterator[Any]: ...

  def __next__(self) -> Any: ...

  def state(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """How long to train, and how often to record.

  Attributes:
    steps: optimizer steps in all.
    seconds: also stop after this much training time, restarts included, compilation
      not; 0 is no limit. Several processes stop a step after the first clock has
      reached it.
    checkpoint_every: steps between checkpoints; the last step always has one.
    keep_every_steps: checkpoints of steps that it divides are never deleted; 0: only
      the newest are kept.
    log_every: steps between metric records.
    max_skipped: steps in a row that are skipped because loss or gradient is not finite;
      one more ends the run, with a checkpoint.
  """

  steps: int
  seconds: float = 0.0
  checkpoint_every: int = 200
  keep_every_steps: int = 0
  log_every: int = 5
  max_skipped: int = 10

  def reached(self, done: int, used_s: float) -> bool:
    """Whether the budget is used up after `done` steps and `used_s` seconds."""
    return done >= self.steps or bool(self.seconds and used_s >= self.seconds)

  def progress(self, done: int, used_s: float) -> float:
    """Fraction of the budget that is used, at most 1."""
    by_time = used_s / self.seconds if self.seconds else 0.0
    return min(max(done / self.steps, by_time), 1.0)


@dataclasses.dataclass(frozen=True)
class Run:
  """Where a run's checkpoints and metrics go.

  Attributes:
    phase: its name in the metrics.
    manager: manages its checkpoints.
    metrics: writer of its records.
    host: JSON-able values for every checkpoint, such as the config.
    files: files for every checkpoint, such as the tokenizer.
    scalars: values that every record has, such as statistics of the data.
  """

  phase: str
  manager: CheckpointManager
  metrics: MetricsWriter
  host: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  scalars: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def with_host(self, **values: Any) -> Run:
    """The same run with more values for every checkpoint."""
    return dataclasses.replace(self, host={**self.host, **values})


@stopping.deferred()
def fit(
  state: TrainState,
  step: Step,
  make_batches: Callable[[dict[str, Any] | None], Batches],
  to_forest: Callable[[Any], Forest],
  config: LoopConfig,
  run: Run,
) -> TrainState:
  """Trains until the budget is used up, resuming from the run's latest checkpoint.

  SIGTERM ends it at the next step boundary, or the one after if there are several
  processes, with a checkpoint.

  Args:
    state: the state to start from without a checkpoint.
    step: the result of `train.step.make_step`.
    make_batches: data position (None: the beginning) → iterator.
    to_forest: batch → host Forest.
    config: the budget.
    run: where checkpoints and records go.

  Raises:
    NotFinite: loss or gradient was not finite in more than `max_skipped` steps in a
      row, which were skipped; after a checkpoint.
    KeyboardInterrupt: the job was asked to stop (`stopping`); after a checkpoint.
  """
  state, batches, used_s = _resume(state, make_batches, run)
  first = done = int(state.step)
  if config.reached(done, used_s):
    return state
  skips = Skips(config.max_skipped)
  clock, records, saved = _Clock(used_s), _Records(run, skips), None
  end = _End(config)

  def save():
    nonlocal saved
    # The record first: a restart from this checkpoint does not repeat its step.
    records.finish()
    host = {'data': batches.state(), 'used_s': used_s, **run.host}
    with records.saving():
      run.manager.save(done, state, host, run.files)
    saved = done

  progress.report('compiling the train step')
  for batch in batches:
    forest = to_forest(batch)
    state, scalars = step(state, forest)
    done += 1
    records.stepped(forest.num_tokens, scalars)
    used_s = clock.used_s()
    if done == first + 1:
      logging.info('%s: compiled in %.0f s', run.phase, clock.compiled_s())
      progress.report('')
    over = end.reached(done, used_s, (state, scalars)) or skips.too_many
    if done % config.log_every == 0 or over:
      share, epoch = config.progress(done, used_s), getattr(batches, 'epoch', None)
      records.hold(done, scalars, used_s=used_s, progress=share, epoch=epoch)
    if over or done % config.checkpoint_every == 0:
      save()
    if over:
      break
  else:
    logging.info('%s: the data ended after step %d', run.phase, done)
    if done not in (first, saved):
      save()
  run.manager.wait()
  skips.check(f'{run.phase} step {done}')
  return state


class _End:
  """Whether a run ends after a step, for all of its processes alike.

  Several processes vote while the next step runs, so that none waits for a step: the
  run ends one step after the first of them wants to. On CPUs they wait, since Gloo
  confuses the collectives of two programs that run at the same time.
  """

  def __init__(self, config: LoopConfig):
    self._config, self._vote = config, None

  def reached(self, done: int, used_s: float, results: Any) -> bool:
    """To be called by every process after every step, with its results."""
    stop, full = stopping.requested(), self._config.reached(done, used_s)
    if jax.process_count() == 1 or done >= self._config.steps:
      return stop or full
    alone = jax.default_backend() == 'cpu'
    if alone:
      jax.block_until_ready(results)
    before, self._vote = self._vote, largest(2 if stop else int(full))
    if alone:
      self._vote.block_until_ready()
    agreed = 0 if before is None else int(before)
    if agreed == 2:
      stopping.request()
    return agreed > 0


def largest(value: int) -> jax.Array:
  """The largest value of all processes, as an array that need not be there yet."""
  first = {d.process_index: d for d in reversed(jax.devices())}
  mesh = Mesh([first[p] for p in range(jax.process_count())], 'processes')
  each, all_ = (NamedSharding(mesh, PartitionSpec(*a)) for a in (['processes'], []))
  mine = jax.make_array_from_process_local_data(each, np.array([value], np.int32))
  return jax.jit(jnp.max, out_shardings=all_)(mine)


def _resume(state: TrainState, make_batches, run: Run):
  """State, batches and seconds used, of the latest checkpoint if there is one."""
  if run.manager.latest_step() is None:
    return state, make_batches(None), 0.0
  restored = run.manager.restore(like=state)
  run.metrics.supersede(run.phase, restored.step)
  batches = make_batches(restored.host['data'])
  return restored.state, batches, restored.host['used_s']


class _Clock:
  """Seconds of training: of former processes of the run too, compilation excluded."""

  def __init__(self, used_s: float):
    self._start, self._compiled_s = time.monotonic() - used_s, compiling.seconds()

  def compiled_s(self) -> float:
    return compiling.seconds() - self._compiled_s

  def used_s(self) -> float:
    return time.monotonic() - self._start - self.compiled_s()


class _Records:
  """The metrics of a run, each record held until the next step runs."""

  def __init__(self, run: Run, skips: Skips):
    self._run, self._skips = run, skips
    self._flags: list[jax.Array] = []  # `skipped` of steps that are not counted yet
    self._skipped = 0.0  # steps since the last record
    self._held: tuple[int, Any, dict[str, Any]] | None = None
    self._tokens, self._since = 0, time.monotonic()
    self._save_s: float | None = None  # waited for saves since the last record

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Measures a save, for the next record."""
    started_s = time.monotonic()
    yield
    self._save_s = (self._save_s or 0.0) + time.monotonic() - started_s

  def stepped(self, tokens: int, scalars: Mapping[str, jax.Array]) -> None:
    """Writes the record of the step before, while one of `tokens` tokens runs."""
    self._write()
    self._tokens += tokens
    self._flags.append(scalars['skipped'])

  def hold(self, step: int, scalars: Mapping[str, jax.Array], **more: Any) -> None:
    """Holds a record of a step; its metrics stay on the device."""
    now = time.monotonic()
    rate = self._tokens / (now - self._since)
    more |= {'tokens': self._tokens, 'tokens_per_s': rate, **self._run.scalars}
    more |= {'checkpoint/save_s': self._save_s}
    more |= {'disk/free_bytes': self._run.metrics.free_bytes()}
    self._save_s = None
    self._held = step, scalars, more
    self._tokens, self._since = 0, now

  def _write(self) -> None:
    if self._held is not None:
      step, scalars, more = self._held
      self._held = None
      self._count()
      values = fetch(scalars) | {'skipped': self._skipped}
      self._skipped = 0.0
      self._run.metrics.write(self._run.phase, step, values, **more)

  def _count(self) -> None:
    """Counts the steps that were skipped; waits for the last one."""
    for flag in jax.device_get(self._flags):
      self._skips.add(bool(flag))
      self._skipped += float(flag)
    self._flags = []
    if self._skips.in_a_row:
      logging.warning(
        '%s: loss or gradient is not finite; %d steps in a row are skipped',
        *(self._run.phase, self._skips.in_a_row),
      )

  def finish(self) -> None:
    """Counts all steps, and writes the record that is held."""
    self._count()
    self._write()
