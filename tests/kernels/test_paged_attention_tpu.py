"""The TPU kernel of paged attention, interpreted on the CPU with small blocks, and what
the default lowers to (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from m2jax import platforms
from m2jax.kernels import block_sizes, paged_attention
from m2jax.kernels.paged_attention import tpu
from tests.kernels.paged import ROWS, TABLE, attend, case, check

# blocks of two pages, four of a table; of four tokens' queries
SIZES = dict(tokens=32, queries=24, vmem_bytes=32 << 20)
SAME = dict(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def small(interpreted, monkeypatch):
  """Kernels run as XLA loops on the CPU, in small blocks."""
  monkeypatch.setattr(tpu, '_SUBLANES', 4)
  with block_sizes.replaced('tpu', 'paged_attention', **SIZES):
    yield


def unmemoised():
  """`attend` traced anew: jax's caches do not know what a test has patched."""
  return jax.jit(lambda x: attend.__wrapped__(x, 'tpu'))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, **SAME)
def test_prefill(seed):
  """Blocks of queries, the last cut short; rows that share pages, padding, empty rows;
  NaN wherever no row has stored anything."""
  check(case(np.random.default_rng(seed), 9), 'tpu')


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, **SAME)
def test_decode(seed):
  """One token of each row."""
  check(case(np.random.default_rng(seed), 1), 'tpu')


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, **SAME)
def test_trees(seed):
  """Drafts to be verified, of several blocks of queries."""
  check(case(np.random.default_rng(seed), 9, tree=True), 'tpu')


def test_tokens_of_a_whole_word():
  """The last of 32 tokens has the sign bit."""
  check(case(np.random.default_rng(0), 32, tree=True), 'tpu')


def test_low_precision():
  """bfloat16 in tiles of its own; sums in fp32."""
  check(case(np.random.default_rng(1), 5, dtype=jnp.bfloat16), 'tpu', atol=0.02)


def test_cache_of_another_dtype():
  """Queries of float32 over a cache of bfloat16: as if it were float32."""
  one = case(np.random.default_rng(2), 5, dtype=jnp.bfloat16)
  one = one._replace(q=one.q.astype(jnp.float32))
  check(one, 'tpu', atol=3e-6)


def test_beyond_the_table():
  one = case(np.random.default_rng(3), 9, unstored=7.0)
  last = np.full_like(one.position, one.cache.positions - 1)
  want = attend(one._replace(position=last), 'tpu')
  got = attend(one._replace(position=last + 40), 'tpu')
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_more_rows_than_tables_fit(monkeypatch):
  """Rows are then taken a few at a time, to the same bits."""
  one = case(np.random.default_rng(4), 9, tree=True)
  want = attend(one, 'tpu')
  monkeypatch.setattr(tpu, '_MOST_ENTRIES', 2 * TABLE)
  assert tpu._rows_together(ROWS, TABLE) == 1
  assert tpu._rows_together(ROWS, 2 * TABLE + 1) == 0
  jax.tree.map(np.testing.assert_array_equal, unmemoised()(one), want)


@pytest.mark.parametrize('chunk, tree', [(1, False), (9, True)])
@pytest.mark.long
def test_simulated(simulated, chunk, tree):
  """On a simulated TPU, on which a race, a read of what was never written or one out of
  bounds is an error, cores take turns and a page is copied once for a block of queries
  that sees it."""
  steps = []

  def record(token, point, core):
    del core
    steps.append(tuple(int(i) for i in point))
    return token

  one = case(np.random.default_rng(5), chunk, tree=tree, unstored=7.0)
  with simulated(random_seed=0, grid_point_recorder=record):
    check(one, 'tpu')
  items = ROWS * 2 * -(-chunk // 4)
  assert sorted(steps) == [(core, i) for core in range(2) for i in range(items // 2)]


def traced(dtype=jnp.bfloat16):
  """For all platforms."""
  one = case(np.random.default_rng(0), 5, dtype=dtype)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), one)
  run = functools.partial(attend.__wrapped__, implementation=None)
  with platforms.any_platform(), pltpu.force_tpu_interpret_mode(None):
    return jax.jit(run).trace(shapes)


def test_default_is_the_platforms(monkeypatch):
  """Without a name the kernel is lowered for a TPU, on a machine that has none, and
  only there; under x64 too, where a dtype that TPUs lack takes plain XLA."""
  monkeypatch.undo()
  program = traced()
  text = program.lower(lowering_platforms=('tpu',)).as_text()
  assert text.count('tpu_custom_call') == 1
  assert 'custom_call' not in program.lower(lowering_platforms=('cpu',)).as_text()
  with jax.enable_x64():
    for dtype, kernels in ((jnp.float32, 1), (jnp.float64, 0)):
      text = traced(dtype).lower(lowering_platforms=('tpu',)).as_text()
      assert text.count('tpu_custom_call') == kernels


@pytest.mark.parametrize(
  'change, match',
  [
    (dict(dtype=jnp.float16), 'float16.*must be bfloat16'),
    (dict(page=12), 'pages of 12 tokens by 128 dims.*tiles of 8 by 128'),
    (dict(chunk=33, tree=True), 'a tree of 33 tokens: at most 32'),
  ],
)
def test_unsupported(change, match):
  """The error names what the kernel does not support."""
  one = case(np.random.default_rng(0), **{'chunk': 2, **change})
  with pytest.raises(ValueError, match=match):
    paged_attention.attend(*one, implementation='tpu')


def test_no_rows():
  """A grid without a step."""
  one = case(np.random.default_rng(0), 2)
  cache = one.cache._replace(tables=one.cache.tables[:0])
  out, lse = paged_attention.attend(
    one.q[:0], cache, one.position[:0], logsumexp=True, implementation='tpu'
  )
  assert out.shape == (0, *one.q.shape[1:]) and lse.shape == out.shape[:3]
