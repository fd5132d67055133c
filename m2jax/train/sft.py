"""Supervised fine-tuning: samples merged into forests, through the training loop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import logging

from m2jax import forest
from m2jax.checkpoint import policy
from m2jax.config import ModelConfig
from m2jax.data import packing
from m2jax.optim import optimizer as optimizer_lib
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.text import chat
from m2jax.train import hosts as hosts_lib
from m2jax.train import loop, pretrain
from m2jax.train import step as train_step
from m2jax.train.loop import LoopConfig, Run
from m2jax.train.step import StepConfig


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised fine-tuning.

  Attributes:
    tokens_per_step: input tokens of a batch, merged within groups of samples.
    row_tokens: S of the forest rows.
    loop: the budget.
    step: train-step settings.
    optimizer: this phase's optimizer.
    templates: name -> a template in which chats are shown (`data.chats.encode`); the
      report varies templates as it does prompts and tools. Empty: M2's.
  """

  tokens_per_step: int
  row_tokens: int
  loop: LoopConfig
  step: StepConfig
  optimizer: OptimizerConfig
  templates: Mapping[str, chat.Template] = dataclasses.field(
    default_factory=dict, kw_only=True
  )


class Batch(NamedTuple):
  """A batch of samples, merged.

  Attributes:
    forest: the rows of this host.
    num_tokens: tokens of all hosts.
  """

  forest: forest.Forest
  num_tokens: int


def fit(
  config: SftConfig,
  model: ModelConfig,
  variables,
  groups: Sequence[Sequence[forest.Sample]],
  run: Run,
  *,
  seed: int,
  sharding: Sharding = ONE_DEVICE,
) -> train_step.TrainState:
  """Trains on samples, or resumes.

  Args:
    config: the settings.
    model: its shape, which goes into every checkpoint.
    variables: weights to start from; taken over.
    groups: what is learned; the samples of a group are next to each other, so that
      common prefixes are computed once (`data.packing.SampleBatches`).
    run: where checkpoints and records go.
    seed: seed of the order of the groups.
    sharding: the mesh that the returned state is on. Every process calls this with the
      same arguments and its own `run.metrics`, and trains its own rows.

  Raises:
    ValueError: model or row_tokens do not divide over the mesh.
  """
  config = dataclasses.replace(config, step=config.step.on(sharding))
  optimizer = optimizer_lib.make(config.optimizer, model, sharding)
  hosts = hosts_lib.find(sharding)
  train = train_step.make_step(model, optimizer, train_step.nll, config.step, sharding)
  state = train_step.start_state(variables, model, optimizer, sharding)
  partition = optimizer_lib.describe(config.optimizer, state.variables['params'])
  logging.info('%s: %s', run.phase, partition)

  def make_batches(position):
    return packing.SampleBatches(
      groups, tokens_per_batch=config.tokens_per_step, seed=seed, state=position
    )

  def to_batch(samples):
    rows = forest.merge(
      samples, row_tokens=config.row_tokens, row_terms=config.row_tokens
    )
    mine = hosts_lib.part(rows, config.step.micro_rows, hosts.index, hosts.count)
    return Batch(mine, rows.num_tokens)

  def step(state: train_step.TrainState, batch: Batch):
    return train(state, batch.forest)

  return loop.fit(
    state,
    step,
    make_batches,
    to_batch,
    config.loop,
    run.with_host(**policy.host(model)),
  )


def held_out(
  config: SftConfig,
  model: ModelConfig,
  variables,
  groups: Sequence[Sequence[forest.Sample]],
  sharding: Sharding = ONE_DEVICE,
) -> dict[str, float]:
  """`loss` and `mtp_loss` of groups in nats per trained token, means over `tokens`.

  Every process calls it with the same arguments.
  """
  rows = forest.merge(
    list(itertools.chain.from_iterable(groups)),
    row_tokens=config.row_tokens,
    row_terms=config.row_tokens,
  )
  return pretrain.score(config.step.on(sharding), model, variables, [rows], sharding)
