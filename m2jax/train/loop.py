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
  """How long to train, and what to leave behind.

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


def fit(
  state: TrainState,
  step: Step,
  make_batches: Callable[[dict[str, Any] | None], Batches],
  to_forest: Callable[[Any], Forest],
  config: LoopConfig,
  *,
  phase: str,
  manager: CheckpointManager,
  metrics: MetricsWriter,
  host: Mapping[str, Any] | None = None,
  files: Mapping[str, bytes] | None = None,
) -> TrainState:
  """Trains until the budget is used up, resuming from the manager's latest checkpoint.

  Args:
    state: where to start without a checkpoint.
    step: from `train.step.make_step`.
    make_batches: data position (None: the beginning) → iterator.
    to_forest: batch → host Forest.
    config: the budget.
    phase: name in the metrics.
    manager, metrics: where checkpoints and records go.
    host, files: more for every checkpoint (config, tokenizer).

  Raises:
    ValueError: a limit of seconds, and several processes.
    FloatingPointError: the loss or its gradient is not finite; names the step. Checked
      before every checkpoint, so that none holds what came of it.
  """
  if config.seconds and jax.process_count() > 1:
    raise ValueError(
      f'LoopConfig.seconds={config.seconds}: {jax.process_count()} processes would '
      'stop at different steps; set seconds=0 and limit the steps'
    )
  data_state, used_s = None, 0.0
  if manager.latest_step() is not None:
    restored = manager.restore(like=state)
    state, data_state = restored.state, restored.host['data']
    used_s = restored.host['used_s']
    metrics.supersede(phase, restored.step)
  batches = make_batches(data_state)
  scalars = None
  done = int(state.step)
  first = done + 1
  if _over(config, done, used_s):
    return state
  started, compiled_s = time.monotonic() - used_s, compiling.seconds()
  saved = None  # step of the last save
  pending = None  # metrics on the device, of the step before
  tokens, window_started = 0, time.monotonic()

  def save():
    # first the record: a restart from this checkpoint does not take its step again
    nonlocal pending, saved
    if pending is None:
      fetch(scalars, f'{phase} step {done}')
    else:
      _write(metrics, phase, done, *pending)
    pending, saved = None, done
    where = {'data': batches.state(), 'used_s': used_s, **(host or {})}
    manager.save(done, state, where, files)

  for batch in batches:
    forest = to_forest(batch)
    state, scalars = step(state, forest)
    done += 1
    tokens += forest.num_tokens
    if pending is not None:
      _write(metrics, phase, done - 1, *pending)
    pending = None
    used_s = time.monotonic() - started - (compiling.seconds() - compiled_s)
    if done == first:
      logging.info('%s: compiled in %.0f s', phase, compiling.seconds() - compiled_s)
    over = _over(config, done, used_s)
    if done % config.log_every == 0 or over:
      now = time.monotonic()
      progress = done / config.steps
      if config.seconds:
        progress = max(progress, used_s / config.seconds)
      extra = {
        'tokens': tokens,  # since the record before
        'tokens_per_s': tokens / (now - window_started),
        'used_s': used_s,
        'progress': min(progress, 1.0),
        'epoch': getattr(batches, 'epoch', None),
      }
      pending = scalars, extra
      tokens, window_started = 0, now
    if over or done % config.checkpoint_every == 0:
      save()
    if over:
      break
  else:
    logging.info('%s: the data ended after step %d', phase, done)
    if scalars is not None and saved != done:
      save()
  manager.wait()
  return state


def _over(config: LoopConfig, done: int, used_s: float) -> bool:
  return done >= config.steps or bool(config.seconds and used_s >= config.seconds)


def _write(metrics: MetricsWriter, phase: str, step: int, scalars, extra) -> None:
  metrics.write(phase, step, fetch(scalars, f'{phase} step {step}'), **extra)
