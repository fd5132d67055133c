"""Pre-training on plain text: next-token prediction and MTP over rows of documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from m2jax import forest
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.config import ModelConfig
from m2jax.data import packing
from m2jax.observe.metrics import MetricsWriter
from m2jax.optim import optimizer as optimizer_lib
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.train import loop
from m2jax.train import step as train_step
from m2jax.train.loop import LoopConfig
from m2jax.train.step import StepConfig


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
  """Training on documents.

  Attributes:
    rows, row_tokens: B and S of a batch.
    held_out_batches: most batches that the held-out loss is measured on.
    loop: the budget.
    step: train-step settings.
    optimizer: what updates the weights.
  """

  rows: int
  row_tokens: int
  held_out_batches: int
  loop: LoopConfig
  step: StepConfig
  optimizer: OptimizerConfig


def fit(
  config: PretrainConfig,
  model: ModelConfig,
  documents: Sequence[np.ndarray],
  *,
  seed: int,
  manager: CheckpointManager,
  metrics: MetricsWriter,
  host: Mapping[str, Any],
  files: Mapping[str, bytes],
) -> train_step.TrainState:
  """Trains from random weights, or resumes.

  Args:
    documents: source of token arrays (see `data.stream`).
    seed: of the weights and of the order of the documents.
    host, files: go into every checkpoint.
  """
  optimizer = optimizer_lib.make(config.optimizer)
  variables = train_step.init_variables(model, jax.random.key(seed))
  step = train_step.make_step(model, optimizer, train_step.nll, config.step)
  rows = {'row_tokens': config.row_tokens, 'rows': config.rows}

  def make_batches(position):
    return packing.DocumentRows(documents, **rows, seed=seed, state=position)

  return loop.fit(
    train_step.init_state(variables, optimizer),
    step,
    make_batches,
    lambda pieces: train_step.normalise(_forest(config, pieces)),
    config.loop,
    phase='pretrain',
    manager=manager,
    metrics=metrics,
    host=host,
    files=files,
  )


def held_out(
  config: PretrainConfig, model: ModelConfig, variables, documents: Sequence[np.ndarray]
) -> dict[str, float]:
  """`loss` and `mtp_loss` in nats per token, means over so many `tokens`."""
  batches = packing.DocumentRows(
    documents, row_tokens=config.row_tokens, rows=config.rows, seed=None, epochs=1
  )
  pieces = (p for p, _ in zip(batches, range(config.held_out_batches), strict=False))
  return score(config.step, model, variables, (_forest(config, p) for p in pieces))


def score(
  config: StepConfig, model: ModelConfig, variables, batches: Iterable[forest.Forest]
) -> dict[str, float]:
  """Means over the loss terms of batches; see `held_out`."""

  @jax.jit
  def sums(variables, batch):
    _, (metrics, _) = train_step.loss_and_loads(
      variables['params'], variables['router'], batch, model, train_step.nll, config
    )
    return metrics

  totals, tokens = {}, 0.0
  for batch in batches:
    tokens += float(np.sum(batch.weight))
    for part in train_step.micro_batches(batch, config.micro_rows):
      for name, value in jax.device_get(sums(variables, part)).items():
        totals[name] = totals.get(name, 0.0) + float(value)
  means = {name: total / max(tokens, 1.0) for name, total in totals.items()}
  return {**means, 'tokens': int(tokens)}


def _forest(config: PretrainConfig, pieces: Sequence[np.ndarray]) -> forest.Forest:
  """One compiled shape, whatever the documents' lengths."""
  return forest.chain(
    pieces,
    row_tokens=config.row_tokens,
    rows=config.rows,
    row_terms=config.row_tokens,
  )
