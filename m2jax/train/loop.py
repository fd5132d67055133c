"""The training loop over an iterator of batches: pre-training and SFT.

Metrics of step N−1 are fetched while step N runs. A checkpoint holds the train state
beside the data position and the time used, so that a killed run continues with the
exact next batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
from absl import logging

from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forest import Forest
from m2jax.observe import compiling
from m2jax.observe.metrics import MetricsWriter
from m2jax.train.step import Step, TrainState, fetch


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
      not; 0 is no limit. For one process only: several would stop at different steps.
    checkpoint_every: steps between checkpoints; the last step always has one.
    log_every: steps between metric records.
  """

  steps: int
  seconds: float = 0.0
  checkpoint_every: int = 200
  log_every: int = 5

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
    manager: of its checkpoints.
    metrics: writer of its records.
    host: JSON-able values for every checkpoint, such as the config.
    files: files for every checkpoint, such as the tokenizer.
  """

  phase: str
  manager: CheckpointManager
  metrics: MetricsWriter
  host: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

  def with_host(self, **values: Any) -> Run:
    """The same run with more values for every checkpoint."""
    return dataclasses.replace(self, host={**self.host, **values})


def fit(
  state: TrainState,
  step: Step,
  make_batches: Callable[[dict[str, Any] | None], Batches],
  to_forest: Callable[[Any], Forest],
  config: LoopConfig,
  run: Run,
) -> TrainState:
  """Trains until the budget is used up, resuming from the run's latest checkpoint.

  Args:
    state: where to start without a checkpoint.
    step: from `train.step.make_step`.
    make_batches: data position (None: the beginning) → iterator.
    to_forest: batch → host Forest.
    config: the budget.
    run: where checkpoints and records go.

  Raises:
    ValueError: a limit of seconds, and several processes.
    FloatingPointError: the loss or its gradient is not finite; names the step. Checked
      before every checkpoint, so that none is saved after such a step.
  """
  if config.seconds and jax.process_count() > 1:
    raise ValueError(
      f'LoopConfig.seconds={config.seconds}: {jax.process_count()} processes would '
      'stop at different steps; set seconds=0 and limit the steps'
    )
  state, position, used_s = _restore(state, run)
  batches = make_batches(position)
  first = done = int(state.step)
  if config.reached(done, used_s):
    return state
  clock, records = _Clock(used_s), _Records(run)
  scalars, saved = None, None  # metrics of the last step; step of the last checkpoint

  def save():
    nonlocal saved
    # The record first: a restart from this checkpoint does not repeat its step.
    if not records.write():
      fetch(scalars, f'{run.phase} step {done}')
    host = {'data': batches.state(), 'used_s': used_s, **run.host}
    run.manager.save(done, state, host, run.files)
    saved = done

  for batch in batches:
    forest = to_forest(batch)
    state, scalars = step(state, forest)
    done += 1
    records.write()  # of the step before, while this one runs
    records.count(forest.num_tokens)
    used_s = clock.used_s()
    if done == first + 1:
      logging.info('%s: compiled in %.0f s', run.phase, clock.compiled_s())
    over = config.reached(done, used_s)
    if done % config.log_every == 0 or over:
      progress, epoch = config.progress(done, used_s), getattr(batches, 'epoch', None)
      records.hold(done, scalars, used_s=used_s, progress=progress, epoch=epoch)
    if over or done % config.checkpoint_every == 0:
      save()
    if over:
      break
  else:
    logging.info('%s: the data ended after step %d', run.phase, done)
    if scalars is not None and saved != done:
      save()
  run.manager.wait()
  return state


def _restore(
  state: TrainState, run: Run
) -> tuple[TrainState, dict[str, Any] | None, float]:
  """State, data position and seconds used, of the latest checkpoint if there is one."""
  if run.manager.latest_step() is None:
    return state, None, 0.0
  restored = run.manager.restore(like=state)
  run.metrics.supersede(run.phase, restored.step)
  return restored.state, restored.host['data'], restored.host['used_s']


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

  def __init__(self, run: Run):
    self._run = run
    self._held: tuple[int, Any, dict[str, Any]] | None = None
    self._tokens, self._since = 0, time.monotonic()

  def count(self, tokens: int) -> None:
    """Adds a step's tokens to the next record."""
    self._tokens += tokens

  def hold(self, step: int, scalars: Mapping[str, jax.Array], **more: Any) -> None:
    """Holds a record of a step; its metrics stay on the device."""
    now = time.monotonic()
    rate = self._tokens / (now - self._since)
    more |= {'tokens': self._tokens, 'tokens_per_s': rate}
    self._held = step, scalars, more
    self._tokens, self._since = 0, now

  def write(self) -> bool:
    """Writes the record that is held; False where there is none."""
    if self._held is None:
      return False
    step, scalars, more = self._held
    phase, self._held = self._run.phase, None
    self._run.metrics.write(phase, step, fetch(scalars, f'{phase} step {step}'), **more)
    return True
