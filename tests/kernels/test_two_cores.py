"""A v5p chip is one device of two cores, which divide a kernel's first grid axis."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from m2jax import config
from m2jax.kernels import grouped_matmul, qk_norm_rope, tree_attention
from tests.jaxprs import equations

M2 = config.m2()
TOKENS, EXPERTS = 8192, 8


def attention(shards):
  def run(q, k, v, end):
    seen = tree_attention.Visibility(end)
    return tree_attention.attend(q, k, v, seen, implementation='tpu')

  q, k = (
    ((1, TOKENS, n // shards, M2.head_dim), jnp.bfloat16)
    for n in (M2.num_heads, M2.num_kv_heads)
  )
  return run, [q, k, k, ((1, TOKENS), jnp.int32)]


def matmul(shards, down):
  sides = [M2.embed_dim, M2.expert_dim // shards]
  width, hidden = sides[::-1] if down else sides
  run = functools.partial(grouped_matmul.matmul, implementation='tpu')
  shapes = [(TOKENS, width), (EXPERTS, width, hidden)]
  return run, [*((s, jnp.bfloat16) for s in shapes), ((EXPERTS,), jnp.int32)]


def norm_rope(shards):
  channels, half = M2.num_kv_heads // shards * M2.head_dim, M2.rotary_dim // 2
  run = functools.partial(
    qk_norm_rope.norm_rope,
    head_dim=M2.head_dim,
    eps=M2.rms_norm_eps,
    implementation='tpu',
  )
  x, scale, table = (TOKENS, channels), (channels,), (TOKENS, half)
  return run, [(x, jnp.bfloat16), *((s, jnp.float32) for s in (scale, table, table))]


MAKERS = {
  'attention': attention,
  'gate and up': functools.partial(matmul, down=False),
  'down': functools.partial(matmul, down=True),
  'norm and rope': norm_rope,
}


@pytest.mark.parametrize(
  'shards', [1, 8, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 4))]
)
@pytest.mark.parametrize('name', MAKERS)
def test_both_cores_have_work(name, shards):
  """Forward and backward at M2's shapes on each of `shards` tensor-parallel devices:
  the first axis is parallel and even, and no other has to be shared."""
  run, shapes = MAKERS[name](shards)
  arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
  floats = [i for i, a in enumerate(arrays) if a.dtype != jnp.int32]

  def loss(*arrays):
    return jnp.sum(run(*arrays).astype(jnp.float32))

  program = jax.make_jaxpr(jax.grad(loss, argnums=floats))(*arrays)
  calls = [e for e in equations(program.jaxpr) if e.primitive.name == 'pallas_call']
  assert len(calls) == (2 if name == 'norm and rope' else 3)
  for call in calls:
    first, *others = call.params['compiler_params'].dimension_semantics
    assert first == 'parallel' and set(others) <= {'arbitrary'}
    assert call.params['grid_mapping'].grid[0] % 2 == 0, call.params['name']
