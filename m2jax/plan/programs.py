"""The programs of a workload with the shapes and shardings of their arguments.

A train step is that of `train.step.make_step`: `micro` for every pass, `add` between
passes, `apply` at the end. RL has those of the learner: `micro` replays recorded expert
ids, and `push`, `leaf` and `pop` (`train.chunks`) train trees that do not fit into a
row. Serving has calls of `rollout.engine`. Nothing here has data: shapes with shardings
are enough to compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import forest
from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.layers import prefix_cache
from m2jax.optim import gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.plan.workloads import TRAINING, Placed, PlanConfig, Workload
from m2jax.rl import learner
from m2jax.rollout.engine import forward, placement
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.train import chunks
from m2jax.train import step as train_step


class Program(NamedTuple):
  """One compiled program of a workload.

  Attributes:
    name: 'micro', 'add', 'apply', 'push', 'leaf', 'pop', 'prefill' or 'decode'.
    jitted: a function with `lower`.
    arguments: ShapeDtypeStructs with shardings.
    runs: number of its runs in a step; 0 of chunks, which depend on the trees.
    resident: trees of arrays that are in HBM at the same time and are no arguments.
  """

  name: str
  jitted: Callable[..., Any]
  arguments: tuple[Any, ...]
  runs: int
  resident: tuple[Any, ...] = ()


def device_bytes(tree: Any) -> int:
  """Bytes on one device of shapes with shardings, without the padding of tiles."""

  def one(x):
    shape = x.sharding.shard_shape(x.shape)
    size = jnp.dtype(x.dtype).itemsize
    for n in shape:
      size *= n
    return size

  return sum(map(one, jax.tree.leaves(tree)))


def batch(cfg: ModelConfig, placed: Placed) -> forest.Forest:
  """Shapes of one pass's forest; RL's has expert ids to replay."""
  rows, tokens = placed.micro_rows, placed.workload.context
  shapes = jax.eval_shape(lambda: forest.causal(jnp.zeros((rows, tokens), jnp.int32)))
  terms = placed.workload.terms or shapes.weight.shape[1]
  cut = {
    name: jax.ShapeDtypeStruct((rows, terms), getattr(shapes, name).dtype)
    for name in forest.TERM_FIELDS
    if getattr(shapes, name) is not None
  }
  if placed.workload.kind == 'rl':
    ids = rows, tokens, cfg.num_layers, cfg.experts_per_token
    cut['experts'] = jax.ShapeDtypeStruct(ids, jnp.int32)
  return dataclasses.replace(shapes, **cut)


def train_state(config: PlanConfig, where: sharding_lib.Sharding) -> Any:
  """Shapes and shardings of a TrainState."""
  cfg = config.model
  optimizer = optimizer_lib.make(config.optimizer, cfg, where)
  state = jax.eval_shape(
    lambda key: train_step.new_state(cfg, optimizer, key), jax.random.key(0)
  )
  return where.shaped(state, train_step.state_specs(cfg, optimizer, where.rules))


def train(
  config: PlanConfig, placed: Placed, where: sharding_lib.Sharding
) -> list[Program]:
  """`micro`, `add` where there are several passes, and `apply`; RL's chunks.

  Raises:
    ValueError: the model or the batch does not divide over the mesh.
  """
  cfg, load = config.model, placed.workload
  where.check(cfg)
  where.check_batch(placed.micro_rows, load.context)
  optimizer = optimizer_lib.make(config.optimizer, cfg, where)
  objective, step = _objective(config, placed)
  parts = train_step.programs(cfg, optimizer, objective, step, where)
  state = train_state(config, where)
  forest_shapes = where.shaped(
    batch(cfg, placed), sharding_lib.batch_specs(where.rules)
  )
  sums = _sums(cfg, parts, state.variables, forest_shapes, where)
  several = placed.passes > 1
  held = (state.opt_state, state.step, *((sums,) if several else ()))
  variables = gnmr.with_route(state.variables, state.opt_state)
  programs = [
    Program('micro', parts.micro, (variables, forest_shapes), placed.passes, held)
  ]
  if several:
    programs.append(
      Program('add', parts.add, (sums, sums), placed.passes - 1, (state,))
    )
  programs.append(Program('apply', parts.apply, (state, sums), 1))
  if load.chunk_tokens:
    parts = chunks.programs(cfg, objective, step, where)
    programs += _chunks(cfg, load, parts, state, sums, chunks.rows_only(where))
  return programs


def _objective(config: PlanConfig, placed: Placed):
  """The loss and the settings of a workload's step."""
  rl = placed.workload.kind == 'rl'
  objective = train_step.nll
  if rl:
    objective = learner.Objective(config.estimator)
  return objective, train_step.StepConfig(
    micro_rows=placed.micro_rows,
    mtp_weight=config.mtp_weight,
    detach_mtp=rl,
    bias_update_rate=config.bias_update_rate,
  )


def _sums(cfg, parts, variables, forest_shapes, where: sharding_lib.Sharding):
  """Shapes and shardings of a pass's results."""
  gradients, *scalars = jax.eval_shape(parts.micro, variables, forest_shapes)
  everywhere = jax.sharding.PartitionSpec()
  specs = sharding_lib.param_specs(cfg, where.rules)['params']
  return train_step.Sums(
    where.shaped(gradients, specs),
    *(where.shaped(tree, everywhere) for tree in scalars),
  )


def _chunks(
  cfg: ModelConfig,
  load: Workload,
  parts: chunks.Programs,
  state: train_step.TrainState,
  sums: train_step.Sums,
  where: sharding_lib.Sharding,
) -> list[Program]:
  """Push, leaf and pop of a chunk at the end of a path of `load.context` tokens.

  Their shapes are those that `forest.cut` makes of a chain with recorded expert ids.
  """
  size, one = load.chunk_tokens, cfg.num_layers
  buckets = forest.Buckets((size,), (load.context,), terms_per_token=1)
  length = 2 * size + 1  # two runs of the path, of which the second sees the stack
  ids = np.zeros((length, one, cfg.experts_per_token), np.int32)
  values = np.ones(length - 1, np.float32)
  sample = forest.Sample(
    np.zeros(length, np.int32), 1, values, values, values, experts=ids
  )
  batches = {c.kind: c.batch for c in forest.cut(forest.merge([sample]), buckets)}
  rows, specs = where.size('rows'), sharding_lib.batch_specs(where.rules)

  def of_kind(kind):
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batches[kind]
    )
    return where.shaped(like, specs)

  buffers = jax.eval_shape(lambda: parts.buffers(chunks.stack_slots(buckets)))
  cache = prefix_cache.specs(where.rules)
  stack, cotangents = (where.shaped(buffer, cache) for buffer in buffers)
  start = where.shaped(
    jax.ShapeDtypeStruct((), jnp.int32), jax.sharding.PartitionSpec()
  )
  variables = gnmr.with_route(state.variables, state.opt_state)
  waiting = (state.opt_state, state.step)
  both = variables, sums, stack, cotangents
  return [
    Program(
      'push',
      parts.push,
      (variables, stack, of_kind('push'), start),
      0,
      (*waiting, sums, cotangents),
    ),
    Program('leaf', parts.leaf, (*both, of_kind('leaf')), 0, waiting),
    Program('pop', parts.pop, (*both, of_kind('pop'), start), 0, waiting),
  ]


def serve(config: PlanConfig, placed: Placed, where: sharding_lib.Sharding) -> Program:
  """A call of `rollout.engine`: a prefill's chunk, or one step of decoding.

  Its slots are the call's rows, and its pages those of their contexts, with room for
  what the call adds.

  Raises:
    ValueError: the model or the rows do not divide over the mesh.
  """
  load, cfg = placed.workload, served(config)
  where = placement.serving(cfg, where)
  where.check_batch(load.rows)
  rows, positions = load.rows, load.context + load.new_tokens
  engine_config = EngineConfig(
    slots=rows,
    context_tokens=positions,
    page_tokens=config.page_tokens,
    decode_rows=(rows,),
    contexts=(positions,),
    prefill_shapes=((rows, load.new_tokens),),
    max_stop_ids=1,
  )
  engine = Engine(cfg, engine_config, where)
  variables = jax.eval_shape(
    lambda key: train_step.init_variables(cfg, key), jax.random.key(0)
  )
  variables = jax.eval_shape(functools.partial(forward.split_layers, cfg), variables)
  variables = where.shaped(variables, placement.weight_specs(cfg, where.rules))
  state = engine.state_shapes()
  if load.kind == 'decode':
    return Program('decode', engine.generate_step, (variables, state), 1)

  def row(*shape):
    like = jax.ShapeDtypeStruct((rows, *shape), jnp.int32)
    return where.shaped(like, placement.rows_spec(where.rules))

  arguments = (row(load.tokens), row(), row(), row(engine_config.context_pages))
  return Program('prefill', engine.prefill_rows, (variables, state, *arguments), 1)


def served(config: PlanConfig) -> ModelConfig:
  """The model as it is served: without MTP, weights in `weights_dtype`."""
  return dataclasses.replace(
    config.model, num_mtp_modules=0, param_dtype=config.weights_dtype
  )


def make(
  config: PlanConfig, placed: Placed, where: sharding_lib.Sharding
) -> list[Program]:
  """The programs of a workload."""
  if placed.workload.kind in TRAINING:
    return train(config, placed, where)
  return [serve(config, placed, where)]


def state_bytes(made: Sequence[Program]) -> tuple[int, int]:
  """Bytes on one device of parameters and optimizer."""
  state = next((p for p in made if p.name == 'apply'), made[0]).arguments[0]
  if isinstance(state, train_step.TrainState):
    return device_bytes(state.variables), device_bytes(state.opt_state)
  return device_bytes(state), 0


def layers(cfg: ModelConfig, num_layers: int) -> ModelConfig:
  """The model with fewer layers, all else as it is; 0 leaves it."""
  return dataclasses.replace(cfg, num_layers=num_layers or cfg.num_layers)
