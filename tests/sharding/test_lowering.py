"""The full model's step traces and lowers for a TPU pod that is not there."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from m2jax import config, forest, platforms, sharding
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import step as train_step


def placed(where, tree, specs):
  """Shapes of `tree` with shardings; `specs` is a prefix of it."""

  def subtree(place, part):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), part
    )

  return jax.tree.map(subtree, where.named(specs), tree)


def lowered(cfg, mesh: sharding.MeshConfig, row_tokens: int) -> str:
  """StableHLO for TPU of a whole step, one row a device."""
  where = sharding.Sharding(sharding.abstract_mesh(mesh), sharding.PRESETS[mesh.rules])
  where.check(cfg)
  rows = where.size('rows')
  optimizer = optimizer_lib.make(optimizer_lib.OptimizerConfig())
  step_config = train_step.StepConfig(micro_rows=rows)
  parts = train_step.programs(cfg, optimizer, train_step.nll, step_config, where)

  @jax.jit
  def step(state, batch):
    return parts.apply(state, parts.micro(state.variables, batch))

  state = jax.eval_shape(
    lambda key: train_step.new_state(cfg, optimizer, key), jax.random.key(0)
  )
  batch = jax.eval_shape(
    lambda: forest.causal(jnp.zeros((rows, row_tokens), jnp.int32))
  )
  arguments = (
    placed(where, state, train_step.state_specs(cfg, optimizer, where.rules)),
    placed(where, batch, sharding.batch_specs(where.rules)),
  )
  with platforms.any_platform():
    traced = step.trace(*arguments)
  return traced.lower(lowering_platforms=('tpu',)).as_text()


EXPERTS = sharding.MeshConfig(fsdp=64, expert=8)
ALL_AXES = sharding.MeshConfig(data=2, fsdp=4, context=4, expert=4, tensor=4)


@pytest.mark.parametrize(
  ('mesh', 'modules'),
  [
    pytest.param(EXPERTS, 1, marks=pytest.mark.long, id='fsdp_ep'),
    pytest.param(ALL_AXES, 1, marks=pytest.mark.long, id='all axes'),
    pytest.param(ALL_AXES, 0, id='all axes, no modules'),
  ],
)
def test_m2_step_lowers_for_512_chips(mesh, modules):
  """Shapes alone suffice; experts are reached by the TPU's ragged all-to-all, and one
  layer stands for 62 in the program."""
  cfg = dataclasses.replace(config.m2(), num_mtp_modules=modules)
  text = lowered(cfg, mesh, 4096)
  count = {
    op: len(re.findall(rf'\b{op}\b', text))
    for op in ('ragged_all_to_all', 'all_gather', 'reduce_scatter', 'all_reduce')
  }
  # A layer and an MTP module go there and back in the forward pass; rows, weights and
  # cotangents go there and two gradients back in the backward pass. The module's
  # forward exchange is recomputed too, for the gradient of the norm after it.
  assert count['ragged_all_to_all'] == (2 * (2 + 5) + 2 if modules else 2 + 5)
  assert count['reduce_scatter'] and count['all_reduce']
  assert count['all_gather'] < 100  # 62 layers written out would have 600
