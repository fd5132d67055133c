"""The GPU kernel of paged attention, interpreted on the CPU with small blocks, and what
it lowers to for CUDA (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2jax.kernels import block_sizes, paged_attention
from tests.kernels import cuda
from tests.kernels.paged import attend, case, check

# blocks of four tokens' queries; rows divided in several parts
SIZES = dict(queries=12, programs=24, warps=4, stages=2)
HALF = cuda.CALL if jax.__version_info__ < (0, 11) else cuda.MOSAIC_CALL
SAME = dict(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def small(interpreted):
  """Kernels run as XLA loops on the CPU, in small blocks."""
  with block_sizes.replaced('gpu', 'paged_attention_triton', **SIZES):
    yield


@given(
  seed=st.integers(0, 2**32 - 1), chunk=st.sampled_from([1, 9]), tree=st.booleans()
)
@settings(**SAME)
def test_equals_loops(seed, chunk, tree):
  """Decoding in four parts of a row's pages, some of them empty, prefill and trees;
  NaN wherever no row has stored anything."""
  check(case(np.random.default_rng(seed), chunk, tree=tree), 'gpu')


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
  """Inputs of 16 bits accumulate in fp32."""
  check(case(np.random.default_rng(1), 9, dtype=dtype), 'gpu', atol=0.02)


@pytest.mark.parametrize(
  'dtype, x64, kernel',
  [
    (jnp.bfloat16, False, HALF),
    (jnp.bfloat16, True, HALF),
    (jnp.float32, True, cuda.CALL),
    (jnp.float64, True, None),
  ],
)
@pytest.mark.parametrize('chunk, tree', [(1, False), (4, True)])
def test_lowers_for_cuda(dtype, x64, kernel, chunk, tree):
  """Without a name one kernel is lowered for CUDA: of Mosaic GPU for 16 bits, of Triton
  for fp32 or an old jax; and plain XLA for a dtype that both lack."""
  with jax.enable_x64(x64):
    one = case(np.random.default_rng(0), chunk, dtype=dtype, tree=tree)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), one)
    run = functools.partial(attend.__wrapped__, implementation=None)
    text = cuda.lowered(run, shapes)
  for call in (cuda.CALL, cuda.MOSAIC_CALL):
    assert text.count(call) == (call == kernel)


@pytest.mark.parametrize(
  'change, match',
  [
    (dict(page=12), 'page 12: must be a power of two'),
    (dict(chunk=33, tree=True), 'a tree of 33 tokens: at most 32'),
  ],
)
def test_unsupported(change, match):
  """The error names what the kernel does not support."""
  one = case(np.random.default_rng(0), **{'chunk': 2, **change})
  with pytest.raises(ValueError, match=match):
    paged_attention.attend(*one, implementation='gpu')
