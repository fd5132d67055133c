"""Experts by grouped matmuls: gradients, and what the gather of tokens costs."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.kernels import grouped_matmul
from m2jax.moe import experts
from tests.jaxprs import equations
from tests.moe import test_tiled as tiled_tests

CALLS = ('custom_vjp_call', 'jit', 'pjit')  # whose equations follow


@pytest.mark.parametrize('kind', ['even', 'one expert', 'elsewhere', 'all elsewhere'])
def test_routings(kind):
  """Value and every gradient against float64 NumPy, one assignment after the other."""
  ids = tiled_tests.routing(kind)
  with jax.enable_x64():
    arrays = tiled_tests.tensors(0, dtype=np.float64)
    want = tiled_tests.by_hand(*arrays, ids)
    got = tiled_tests.value_and_grads(*arrays, jnp.array(ids), run=experts.grouped)
    for name, a, b in zip(tiled_tests.NAMES, got, want, strict=True):
      scale = max(1.0, np.abs(b).max())
      np.testing.assert_allclose(a, b, atol=1e-12 * scale, rtol=0, err_msg=name)


def test_take_and_its_gradient():
  """Rows in any order; the gradient of a token is the sum over its rows."""
  rng = np.random.default_rng(0)
  x, d_rows = rng.normal(size=(7, 3)), rng.normal(size=(14, 3))
  order = rng.permutation(14)
  place = np.argsort(order).reshape(7, 2)
  with jax.enable_x64():
    rows, vjp = jax.vjp(lambda x: experts.take(x, order, place), jnp.array(x))
    (d_x,) = vjp(jnp.array(d_rows))
  np.testing.assert_array_equal(rows, np.repeat(x, 2, axis=0)[order])
  want = np.zeros_like(x)
  np.add.at(want, order // 2, d_rows)
  np.testing.assert_allclose(d_x, want, atol=1e-14)


def test_tokens_are_not_repeated_before_they_are_gathered():
  """Nothing of T·k rows is made before the gather, which reads the tokens themselves;
  the backward pass has no scatter of rows."""
  tokens, width, count, hidden, top_k = 40, 24, 6, 16, 3
  shapes = [(tokens, width), (tokens, top_k), *[(count, width, hidden)] * 2]
  shapes += [(count, hidden, width), (tokens, width)]
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  ids = jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
  with mock.patch.object(grouped_matmul, 'matmul', jax.lax.ragged_dot):
    run = tiled_tests.value_and_grads.__wrapped__
    run = functools.partial(run, run=experts.grouped)
    found = list(equations(jax.make_jaxpr(run)(*arrays, ids).jaxpr))
  long = [
    eqn
    for eqn in found
    for out in eqn.outvars
    if out.aval.size == top_k * tokens * width and eqn.primitive.name not in CALLS
  ]
  assert long[0].primitive.name == 'gather'
  assert long[0].invars[0].aval.shape == (tokens, width)
  scattered = [eqn.invars[0].aval for eqn in found if 'scatter' in eqn.primitive.name]
  assert all(jnp.issubdtype(aval.dtype, jnp.integer) for aval in scattered)
