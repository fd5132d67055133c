"""Paged attention: the reference against NumPy loops, the CPU implementation too, and
against jax's own reference of ragged paged attention (law 7)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged

from m2jax.kernels import paged_attention
from m2jax.kernels.paged_attention import cpu
from tests.kernels.paged import GROUP, KV_HEADS, attend, by_hand, case, check


@given(seed=st.integers(0, 2**32 - 1), tree=st.booleans())
def test_reference_is_softmax_over_what_is_stored(seed, tree):
  """Chains and trees, shared pages, unused entries, padding; nothing that no row has
  stored reaches a result."""
  check(case(np.random.default_rng(seed), 5, tree=tree), 'reference')


@given(seed=st.integers(0, 2**32 - 1), tree=st.booleans(), long=st.booleans())
def test_cpu(seed, tree, long):
  """Both of its ways; what is not stored is finite there."""
  one = case(np.random.default_rng(seed), 5, tree=tree, unstored=7.0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cpu, 'LONG_CHUNK', 5 if long else 6)
    run = jax.jit(
      lambda x, implementation: paged_attention.attend(
        *x, logsumexp=True, implementation=implementation
      ),
      static_argnames='implementation',
    )
    check(one, 'cpu', run=run)


@given(seed=st.integers(0, 2**32 - 1))
def test_along_the_path(seed):
  """'invariant', for chains; several tiles of queries and blocks of keys."""
  check(case(np.random.default_rng(seed), 21, unstored=7.0), 'invariant')


def test_along_the_path_are_no_trees():
  one = case(np.random.default_rng(0), 5, tree=True)
  with pytest.raises(ValueError, match='no trees'):
    attend(one, 'invariant')


@pytest.mark.parametrize('implementation', ['reference', 'cpu'])
def test_low_precision(implementation):
  """bfloat16 accumulates in fp32: near the exact result."""
  one = case(np.random.default_rng(1), 5, dtype=jnp.bfloat16, unstored=7.0)
  check(one, implementation, atol=0.02)


def jax_reference(one):
  """jax's ragged paged attention, whose rows have no padding and whose pages have keys
  and values by turns."""
  live = one.position >= 0
  layer = int(one.cache.layer)
  k, v = (jnp.moveaxis(x[layer], 0, 2) for x in (one.cache.k, one.cache.v))
  pages = jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[3])
  return ragged.ref_ragged_paged_attention(
    one.q[jnp.array(live)],
    pages,
    jnp.array(one.position.max(1) + 1),
    one.cache.tables,
    jnp.array(np.concatenate([[0], np.cumsum(live.sum(1))]), jnp.int32),
    jnp.array([len(live)]),
    sm_scale=one.q.shape[3] ** -0.5,
  )


@pytest.mark.long
def test_equals_jax():
  """Our loops and jax's reference have one definition, where both have one."""
  for seed in range(2):
    one = case(np.random.default_rng(seed), 5, unstored=7.0)
    got = by_hand(one)[0][one.position >= 0]
    np.testing.assert_allclose(jax_reference(one), got, atol=3e-6)


def test_one_layer_needs_no_index():
  """A layer by itself gives the same bits as in its stack."""
  one = case(np.random.default_rng(2), 2, unstored=7.0)
  k, v = (x[1] for x in (one.cache.k, one.cache.v))
  alone = one._replace(cache=paged_attention.Cache(k, v, one.cache.tables))
  a, b = (attend(x, 'cpu')[0] for x in (one, alone))
  np.testing.assert_array_equal(a, b)


def test_beyond_the_table():
  """A token at or beyond the end of its table sees all of it."""
  one = case(np.random.default_rng(3), 3, unstored=7.0)
  S = one.cache.positions
  one = one._replace(position=np.full_like(one.position, S - 1))
  for implementation in ('reference', 'cpu'):
    want = attend(one, implementation)[0]
    far = one._replace(position=one.position + 40)
    got = attend(far, implementation)[0]
    np.testing.assert_array_equal(got, want)


def test_unknown_implementation():
  one = case(np.random.default_rng(0), 1)
  with pytest.raises(ValueError, match="'tpu9', want one of"):
    paged_attention.attend(*one, implementation='tpu9')


def test_the_cache_is_not_copied():
  """A copy of one layer would be most of a step at M2's size: only pages are read."""
  one = case(np.random.default_rng(0), 1)
  k = jax.ShapeDtypeStruct((4, KV_HEADS, 4000, 16, 128), jnp.float32)
  cache = one.cache._replace(k=k, v=k)
  run = jax.jit(lambda q, cache, position: paged_attention.attend(q, cache, position))
  compiled = run.lower(one.q, cache, one.position).compile()
  layer_bytes = KV_HEADS * 4000 * 16 * 128 * 4
  assert compiled.memory_analysis().temp_size_in_bytes < layer_bytes / 8
  assert one.q.shape[2] == KV_HEADS * GROUP
