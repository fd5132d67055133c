"""Pre-training on text: next-token prediction and MTP over rows of documents.

Stages and phases (`stages`) are functions of the number of tokens consumed, which is
part of the data position: a run that is killed and started again continues with the
exact next batch, learning rate and MTP weight.

With several hosts each reads, packs and places its own rows of every batch (`hosts`);
a checkpoint has the position of all of them.

The step is compiled once for each shape of batch and each pair of MTP weight and bias
rate, of which a run has few.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from m2jax import forest
from m2jax import params as params_lib
from m2jax import sharding as sharding_lib
from m2jax.checkpoint import policy
from m2jax.config import ModelConfig
from m2jax.data import packing
from m2jax.optim import optimizer as optimizer_lib
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.train import feeds, loop, stages
from m2jax.train import hosts as hosts_lib
from m2jax.train import step as train_step
from m2jax.train.loop import LoopConfig, Run
from m2jax.train.stages import Pieces, PretrainConfig, Settings, Stage, StagedRows
from m2jax.train.step import StepConfig


class Batch(NamedTuple):
  """This host's rows as a forest, and how the batch is trained.

  Attributes:
    forest: weights are 1 where there is a loss.
    settings: what the step is compiled for.
    consumed: tokens before it.
    num_tokens: of all hosts; rows have no padding.
  """

  forest: forest.Forest
  settings: Settings
  consumed: int
  num_tokens: int


def to_batch(config: PretrainConfig, num_hosts: int, pieces: Pieces) -> Batch:
  """Documents as a forest of the stage's one shape."""
  stage = pieces.stage._replace(rows=pieces.stage.rows // num_hosts)
  rows = _forest(stage, pieces.arrays)
  found = stages.settings(config, pieces.consumed)
  return Batch(rows, found, pieces.consumed, rows.num_tokens * num_hosts)


class _HostRows(StagedRows):
  """`StagedRows` of one host whose state is that of all hosts."""

  def state(self) -> dict[str, Any]:
    """Of all hosts; every host must call it."""
    return stages.merge_states(hosts_lib.gather(super().state()))


Step = Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict]]


class Trainer(NamedTuple):
  """An optimizer and a step over `Batch`es."""

  optimizer: optax.GradientTransformation
  step: Step


def make_trainer(
  config: PretrainConfig,
  model: ModelConfig,
  only_mtp: bool,
  sharding: Sharding = ONE_DEVICE,
) -> Trainer:
  """What `fit` trains with: the same object for the same settings, whatever the budget,
  so that several calls compile once.

  The step adds tokens consumed, context, MTP weight and learning rates to the metrics.
  """
  budget = LoopConfig(steps=0)
  config = dataclasses.replace(config, loop=budget)
  return _make_trainer(config, model, only_mtp, sharding)


@functools.lru_cache(maxsize=4)
def _make_trainer(
  config: PretrainConfig, model: ModelConfig, only_mtp: bool, sharding: Sharding
):
  optimizer = dataclasses.replace(config.optimizer, schedule=stages.schedule(config))
  tx = optimizer_lib.make(optimizer)
  trained = params_lib.shapes(model)['params']
  make = functools.partial(
    train_step.make_step, model, objective=train_step.nll, sharding=sharding
  )
  if only_mtp:
    tx, trained = _only_mtp(tx), {'mtp': trained['mtp']}
    make = functools.partial(_make_frozen_step, model, sharding=sharding)
  logging.info('optimizer: %s', optimizer_lib.describe(optimizer, trained))

  @functools.cache
  def made(values: Settings) -> train_step.Step:
    return make(
      optimizer=tx, config=dataclasses.replace(config.step, **values._asdict())
    )

  rates = jax.jit(functools.partial(optimizer_lib.learning_rates, optimizer))

  def step(state: train_step.TrainState, batch: Batch):
    scales = rates(state.step)
    state, metrics = made(batch.settings)(state, batch.forest)
    metrics |= {f'learning_rate/{name}': rate for name, rate in scales.items()}
    metrics['mtp_weight'] = batch.settings.mtp_weight
    metrics['context'] = batch.forest.tokens.shape[1]
    metrics['consumed_tokens'] = batch.consumed + batch.num_tokens
    return state, metrics

  return Trainer(tx, step)


def fit(
  config: PretrainConfig,
  model: ModelConfig,
  sources: Sequence[Sequence[np.ndarray]],
  run: Run,
  *,
  seed: int,
  variables: dict[str, Any] | None = None,
  only_mtp: bool = False,
  sharding: Sharding = ONE_DEVICE,
) -> train_step.TrainState:
  """Trains from random or given weights, or resumes.

  Args:
    config: the settings.
    model: its shape, which goes into every checkpoint.
    sources: of each stage, a source of token arrays (see `data.stream`).
    run: where checkpoints and records go.
    seed: of the weights and of the order of the documents.
    variables: where to start; taken over. None is random weights.
    only_mtp: freeze the main model, router biases included: only the MTP modules learn.
    sharding: the mesh to train on; `step.micro_rows` are rows over all of it. Every
      process calls this with the same arguments and its own `run.metrics`.

  Raises:
    ValueError: model, rows or streams do not divide over mesh or hosts.
  """
  hosts = hosts_lib.find(sharding)
  trainer = make_trainer(config, model, only_mtp, sharding)
  tx = trainer.optimizer
  if variables is None:
    state = train_step.new_state(model, tx, jax.random.key(seed), sharding)
  else:
    state = train_step.init_state(variables, tx)
    state = train_step.place_state(state, model, tx, sharding)
  return loop.fit(
    state,
    trainer.step,
    lambda position: _HostRows(
      config, sources, seed=seed, state=position, host=(hosts.index, hosts.count)
    ),
    functools.partial(to_batch, config, hosts.count),
    config.loop,
    run.with_host(**policy.host(model)),
  )


def _only_mtp(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """`tx` for the MTP modules; no update and no state for all other parameters."""

  def labels(params):
    def label(path, leaf):
      del leaf
      return 'train' if path[0].key == 'mtp' else 'freeze'

    return jax.tree_util.tree_map_with_path(label, params)

  return optax.partition({'train': tx, 'freeze': optax.set_to_zero()}, labels)


def _make_frozen_step(
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  config: StepConfig,
  sharding: Sharding,
) -> train_step.Step:
  """A step that does not change the main model, bit for bit."""

  def watched(logprob, batch):  # the main loss, for the log, without a gradient
    return train_step.nll(jax.lax.stop_gradient(logprob), batch)

  config = dataclasses.replace(config, detach_mtp=True)
  step = train_step.make_step(model, optimizer, watched, config, sharding)

  def frozen(state: train_step.TrainState, batch: forest.Forest):
    bias = jnp.copy(state.variables['router']['layers'])  # the state is donated
    state, metrics = step(state, batch)
    router = {**state.variables['router'], 'layers': bias}
    variables = {**state.variables, 'router': router}
    return dataclasses.replace(state, variables=variables), metrics

  return frozen


def held_out(
  config: PretrainConfig,
  model: ModelConfig,
  variables,
  documents: Sequence[np.ndarray],
  sharding: Sharding = ONE_DEVICE,
) -> dict[str, float]:
  """`loss` and `mtp_loss` in nats per token, means over `tokens`.

  Rows have the shape of the last stage; each document is read once.
  """
  stage = config.stages[-1]
  batches = packing.DocumentRows(
    documents, row_tokens=stage.context, rows=stage.rows, seed=None, epochs=1
  )
  pieces = (p for p, _ in zip(batches, range(config.held_out_batches), strict=False))
  batches = (_forest(stage, p) for p in pieces)
  return score(config.step, model, variables, batches, sharding)


def score(
  config: StepConfig,
  model: ModelConfig,
  variables,
  batches: Iterable[forest.Forest],
  sharding: Sharding = ONE_DEVICE,
) -> dict[str, float]:
  """Means over the loss terms of batches; see `held_out`."""
  sums = _metrics(config, model, sharding)
  specs = sharding_lib.batch_specs(sharding.rules)
  totals = {'weight': 0.0}
  for batch in batches:
    for part in feeds.micro_batches(batch, config.micro_rows):
      part = sharding.place(part, specs)
      for name, value in jax.device_get(sums(variables, part)).items():
        totals[name] = totals.get(name, 0.0) + float(value)
  tokens = totals.pop('weight')
  means = {name: total / max(tokens, 1.0) for name, total in totals.items()}
  return {**means, 'tokens': int(tokens)}


@functools.lru_cache(maxsize=4)
def _metrics(config: StepConfig, model: ModelConfig, sharding: Sharding):
  """Metrics of one forest batch, compiled once for the same settings."""

  @jax.jit
  def metrics(variables, batch):
    _, (found, _) = train_step.loss_and_loads(
      variables['params'],
      variables['router'],
      batch,
      model,
      train_step.nll,
      config,
      sharding,
    )
    return found

  return metrics


def _forest(stage: Stage, arrays: Sequence[np.ndarray]) -> forest.Forest:
  """The documents in the stage's one shape, whatever their lengths."""
  return forest.chain(
    arrays, row_tokens=stage.context, rows=stage.rows, row_terms=stage.context
  )
