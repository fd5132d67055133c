"""Pre-training on text: next-token prediction and MTP over rows of documents.

Stages and phases (`stages`) are functions of the number of tokens consumed, which is
part of the data position: a run that is killed and restarted continues with exactly the
next batch, learning rate and MTP weight.

With several hosts each reads, packs and places its own rows of every batch (`hosts`);
a checkpoint has the position of all of them.

A stage may have a mesh of its own: where it begins, the state is resharded. A run ends
before a stage whose mesh has another number of devices, and resumes on those.

The step is compiled once for each stage and each pair of MTP weight and bias rate; a
run has only a few.
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
from m2jax.optim.gnmr import GnmrConfig
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.train import feeds, loop, placement, stages
from m2jax.train import hosts as hosts_lib
from m2jax.train import step as train_step
from m2jax.train.loop import LoopConfig, Run
from m2jax.train.placement import Places
from m2jax.train.stages import Pieces, PretrainConfig, Settings, Stage, StagedRows
from m2jax.train.step import StepConfig


class Batch(NamedTuple):
  """This host's rows as a forest, and how the batch is trained.

  Attributes:
    forest: weights are 1 where there is a loss.
    stage: the stage that it belongs to.
    settings: the settings that the step is compiled for.
    consumed: tokens before it.
    num_tokens: tokens of all hosts; rows have no padding.
  """

  forest: forest.Forest
  stage: Stage
  settings: Settings
  consumed: int
  num_tokens: int


def to_batch(config: PretrainConfig, where: Places, pieces: Pieces) -> Batch:
  """Documents as a forest of the stage's one shape."""
  hosts = where[pieces.stage].hosts.count
  rows = _forest(pieces.stage.context, pieces.stage.rows // hosts, pieces.arrays)
  found = stages.settings(config, pieces.consumed)
  return Batch(rows, pieces.stage, found, pieces.consumed, rows.num_tokens * hosts)


Step = Callable[[train_step.TrainState, Batch], tuple[train_step.TrainState, dict]]


class Trainer(NamedTuple):
  """The optimizer on a mesh, what it makes of random weights there, a step over
  `Batch`es, and where the stages are trained."""

  optimizer: Callable[[Sharding], optax.GradientTransformation]
  initializer: Callable[[Sharding], Callable[[Any], Any]]
  step: Step
  places: Places


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
  trained = params_lib.shapes(model)['params']
  make = functools.partial(train_step.make_step, model, objective=train_step.nll)
  if only_mtp:
    trained = {'mtp': trained['mtp']}
    optimizer = dataclasses.replace(optimizer, gnmr=GnmrConfig())  # no layer learns
    make = functools.partial(_make_frozen_step, model)
  logging.info('optimizer: %s', optimizer_lib.describe(optimizer, trained))

  where = placement.places(config, model, sharding)

  @functools.cache
  def tx(place: Sharding) -> optax.GradientTransformation:
    made = optimizer_lib.make(optimizer, model, place)
    return _only_mtp(made) if only_mtp else made

  @functools.cache
  def made(stage: Stage, values: Settings) -> train_step.Step:
    return make(
      optimizer=tx(where[stage].sharding),
      config=step_config(config, stage, values),
      sharding=where[stage].sharding,
      feed=functools.partial(feeds.rows, hosts=where[stage].hosts),
    )

  rates = jax.jit(functools.partial(optimizer_lib.learning_rates, optimizer))

  def step(state: train_step.TrainState, batch: Batch):
    place = where[batch.stage].sharding
    state = placement.move(place, state, model, tx(place))
    scales = rates(state.step)
    state, metrics = made(batch.stage, batch.settings)(state, batch.forest)
    metrics |= {f'learning_rate/{name}': rate for name, rate in scales.items()}
    metrics['mtp_weight'] = batch.settings.mtp_weight
    metrics['context'] = batch.forest.tokens.shape[1]
    metrics['consumed_tokens'] = batch.consumed + batch.num_tokens
    return state, metrics

  initializer = functools.partial(optimizer_lib.initializer, optimizer, model)
  return Trainer(tx, initializer, step, where)


def step_config(config: PretrainConfig, stage: Stage, values: Settings) -> StepConfig:
  """Settings of a step in this stage, at these values of its schedule."""
  return dataclasses.replace(
    config.step, micro_rows=config.micro_rows(stage), **values._asdict()
  )


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
    sources: for each stage, a source of token arrays (see `data.stream`).
    run: where checkpoints and records go.
    seed: seed of the weights and of the order of the documents.
    variables: weights to start from; taken over. None is random weights.
    only_mtp: freeze the main model, router biases included: only the MTP modules learn.
    sharding: the mesh to train on, where a stage has none of its own. Every process
      calls this with the same arguments and its own `run.metrics`.

  Raises:
    ValueError: model or rows of a stage do not divide over its mesh, or its mesh has
      another number of devices than `sharding`.
  """
  config = dataclasses.replace(config, step=config.step.on(sharding))
  trainer = make_trainer(config, model, only_mtp, sharding)
  first = placement.first(config, trainer.places, run, sharding)
  tx = trainer.optimizer(first)
  if variables is None:
    key, initialize = jax.random.key(seed), trainer.initializer(first)
    state = train_step.new_state(model, tx, key, first, initialize)
  else:
    state = train_step.start_state(variables, model, tx, first)
  hosts = [
    place and (place.hosts.index, place.hosts.count)
    for place in map(trainer.places.get, config.stages)
  ]
  state = loop.fit(
    state,
    trainer.step,
    lambda position: StagedRows(
      config, sources, seed=seed, state=position, hosts=hosts, gather=hosts_lib.gather
    ),
    functools.partial(to_batch, config, trainer.places),
    config.loop,
    run.with_host(**policy.host(model)),
  )
  done = int(state.step)
  number = config.stage_at(done)
  if done < config.loop.steps and trainer.places[config.stages[number]] is None:
    logging.warning(
      'step %d ends a stage: %s', done, placement.misfit(config, number, sharding)
    )
  return state


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
  feed: Callable[..., train_step.Feed],
) -> train_step.Step:
  """A step that does not change the main model, bit for bit."""

  def watched(logprob, batch):  # the main loss, for the log, without a gradient
    return train_step.nll(jax.lax.stop_gradient(logprob), batch)

  config = dataclasses.replace(config, detach_mtp=True)
  step = train_step.make_step(model, optimizer, watched, config, sharding, feed=feed)

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
  *,
  step: int | None = None,
) -> dict[str, float]:
  """`loss` and `mtp_loss` in nats per token, means over `tokens`.

  Rows have the shape of the stage in which the batch before `step` was trained, and its
  mesh; None: of the last stage. Each document is read once.
  """
  config = dataclasses.replace(config, step=config.step.on(sharding))
  stage = config.stages[-1 if step is None else config.stage_at(max(step - 1, 0))]
  place = placement.places(config, model, sharding)[stage]
  where = sharding if place is None else place.sharding
  batches = packing.DocumentRows(
    documents, row_tokens=stage.context, rows=stage.rows, seed=None, epochs=1
  )
  pieces = (p for p, _ in zip(batches, range(config.held_out_batches), strict=False))
  batches = (_forest(stage.context, stage.rows, p) for p in pieces)
  specs = sharding_lib.param_specs(model, where.rules)
  variables = placement.reshard(where, variables, specs)
  settings = Settings(config.step.mtp_weight, config.step.bias_update_rate)
  return score(step_config(config, stage, settings), model, variables, batches, where)


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


def _forest(context: int, rows: int, arrays: Sequence[np.ndarray]) -> forest.Forest:
  """The documents in one shape, whatever their lengths."""
  return forest.chain(arrays, row_tokens=context, rows=rows, row_terms=context)
