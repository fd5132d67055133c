"""Gradients of weights split in storage are exchanged in the dtype that the rules name.

Traced for a mesh without devices: what is exchanged, not what comes out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from m2jax import sharding
from m2jax.sharding import PRESETS, MeshConfig, Sharding
from tests import jaxprs


@pytest.mark.parametrize('dtype', (None, 'bfloat16'))
def test_reduce_scatters(dtype):
  """Of q and of an expert's matrix; the gradient itself stays fp32."""
  rules = dataclasses.replace(PRESETS['fsdp'], gradient_dtype=dtype)
  where = Sharding(sharding.abstract_mesh(MeshConfig(fsdp=4)), rules)
  like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = {'q': like(16, 8), 'gate': like(2, 16, 8)}
  specs = {
    name: rules.spec(name, *sharding.rules.params.BY_NAME[name].split)
    for name in params
  }

  def loss(params):
    whole = where.gather_params(params, 'bfloat16')
    return sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in whole.values())

  grad = where.shard_map(jax.grad(loss), (specs,), specs)
  traced = jax.make_jaxpr(grad)(params)
  assert all(a.dtype == jnp.float32 for a in traced.out_avals)
  found = [
    e for e in jaxprs.equations(traced.jaxpr) if e.primitive.name == 'reduce_scatter'
  ]
  assert len(found) == 2
  assert all(e.invars[0].aval.dtype == (dtype or 'float32') for e in found)


def test_an_unknown_dtype_is_named():
  for kind in (MeshConfig, sharding.Rules):
    with pytest.raises(ValueError, match=f"{kind.__name__}.gradient_dtype='int8'"):
      kind(gradient_dtype='int8')


def test_what_is_used_in_fp32_is_gathered_so():
  """Router and head keep the dtype they are stored in; the rest is gathered as used."""
  rules = PRESETS['fsdp']
  where = Sharding(sharding.abstract_mesh(MeshConfig(fsdp=4)), rules)
  shapes = {'q': (16, 8), 'router': (16, 4), 'head': (16, 32)}
  params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
  specs, whole = (
    {name: rules.spec(name, *axes(name)) for name in params}
    for axes in (lambda name: sharding.rules.params.BY_NAME[name].split, lambda _: ())
  )
  gather = lambda params: where.gather_params(params, 'bfloat16')
  gathered = jax.eval_shape(where.shard_map(gather, (specs,), whole), params)
  found = {name: (a.shape, str(a.dtype)) for name, a in gathered.items()}
  wide = {'router': 'float32', 'head': 'float32'}
  assert found == {k: (v, wide.get(k, 'bfloat16')) for k, v in shapes.items()}
