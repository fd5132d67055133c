"""Dealing a row's tokens to the devices that share it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import config, model, params
from m2jax.plan import flops
from m2jax.sharding import PRESETS, MeshConfig, Sharding, abstract_mesh
from tests.sharding import small

TOKENS = 48


def over(shards, function, *arguments):
  """`function(sharding, …)` on every shard, as a `vmap` with the mesh axis's name."""
  mesh = abstract_mesh(MeshConfig(context=shards))
  where = Sharding(mesh, PRESETS['fsdp_ep'])
  run = jax.vmap(
    lambda *shard: function(where, *shard), axis_name='context', axis_size=shards
  )
  return where, run(*arguments)


@pytest.mark.parametrize('shards', [2, 3, 4])
def test_every_device_sees_as_many_pairs(shards):
  """Else a step would wait for the device with the last tokens. The plan counts one
  device's pairs by the same runs."""
  where, index = over(shards, lambda s: s.token_index(TOKENS // shards))
  np.testing.assert_array_equal(np.sort(index.reshape(-1)), np.arange(TOKENS))
  seen = np.sum(np.asarray(index) + 1, axis=1)
  assert set(seen) == {TOKENS * (TOKENS + 1) / 2 / shards}
  part = flops.local(config.tiny(), where, 1, TOKENS, TOKENS)
  assert flops.pairs(part) == seen[0]


@pytest.mark.parametrize('shards', [2, 3, 4])
def test_deal_gather_and_collect(shards):
  """What is dealt is gathered in the row's order, and collected as it was stored."""
  row = jnp.arange(2 * TOKENS * 5).reshape(2, TOKENS, 5)
  stored = jnp.stack(jnp.split(row, shards, axis=1))

  def both(where, x):
    zigzag = where.to_zigzag(x)
    return zigzag, where.gather_tokens(zigzag), where.from_zigzag(zigzag)

  where, (dealt, gathered, collected) = over(shards, both, stored)
  _, index = over(shards, lambda s: s.token_index(TOKENS // shards))
  for shard in range(shards):
    np.testing.assert_array_equal(dealt[shard], row[:, index[shard]])
    np.testing.assert_array_equal(gathered[shard], row)
  np.testing.assert_array_equal(collected, stored)


def test_rows_that_cannot_be_dealt_are_refused():
  """Every device needs two runs of equal length."""
  where = Sharding(abstract_mesh(MeshConfig(context=4)), PRESETS['fsdp_ep'])
  where.check_batch(1, 48)
  with pytest.raises(ValueError, match='44 tokens .* 8 equal parts'):
    where.check_batch(1, 44)


def test_a_model_without_mtp_over_context():
  """Its MTP outputs have no rows to put back into order: found by compiling the plan's
  smallest case, which failed on a size of 0."""
  cfg = small.config(num_mtp_modules=0, dtype='float32', param_dtype='float32')
  mesh = abstract_mesh(MeshConfig(context=2))
  where = Sharding(mesh, PRESETS['fsdp_ep'])
  batch = small.batch(0, 1)
  out = jax.eval_shape(
    lambda v: model.forward(cfg, v, batch, sharding=where), params.shapes(cfg)
  )
  assert out.logprob.shape == batch.tokens.shape and not out.mtp_logprob.size
