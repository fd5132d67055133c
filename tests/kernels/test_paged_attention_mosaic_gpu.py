"""The Mosaic GPU kernel of paged attention: interpreted on the CPU, where races between
copies and products are looked for, and what it lowers to for an H100 (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.kernels import block_sizes, paged_attention
from m2jax.kernels.paged_attention import mosaic_gpu
from tests.kernels import cuda
from tests.kernels.paged import attend, case, check

# a ring of two slots; rows of up to two or four steps in one part, or divided
SIZES = dict(keys=64, slots=2, programs=1)
old = pytest.mark.skipif(
  jax.__version_info__ < (0, 11), reason='jax 0.10 does not interpret Mosaic GPU'
)


@pytest.fixture
def simulated_gpu(monkeypatch):
  """Kernels run on the CPU, in simulated threads and memory spaces, in the context of
  block sizes that this returns."""
  params = mosaic_gpu.plgpu.InterpretGPUParams(detect_races=True)
  call = functools.partial(mosaic_gpu.plgpu.kernel, interpret=params)
  monkeypatch.setattr(mosaic_gpu.plgpu, 'kernel', call)
  return functools.partial(block_sizes.replaced, 'gpu', 'paged_attention', **SIZES)


@old
@pytest.mark.smoke
@pytest.mark.parametrize(
  'page, chunk, tree, programs, dtype',
  [
    (32, 1, False, 1, jnp.bfloat16),  # four steps through two slots
    (32, 1, False, 24, jnp.bfloat16),  # in parts, some of them empty
    (16, 23, False, 1, jnp.float16),  # several blocks of queries
    (128, 9, True, 24, jnp.bfloat16),  # a page is more than 64 keys
  ],
)
def test_equals_loops(simulated_gpu, page, chunk, tree, programs, dtype):
  """Decoding, prefill and trees; NaN wherever no row has stored anything."""
  one = case(
    np.random.default_rng(page + chunk), chunk, page=page, dtype=dtype, tree=tree
  )
  with simulated_gpu(programs=programs):
    check(one, 'mosaic_gpu', atol=0.02)


@old
@pytest.mark.parametrize('chunk, tree', [(1, False), (4, True)])
def test_lowers_for_cuda(chunk, tree):
  """One kernel for an H100."""
  one = case(np.random.default_rng(0), chunk, dtype=jnp.bfloat16, tree=tree)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), one)
  run = functools.partial(attend.__wrapped__, implementation='mosaic_gpu')
  assert cuda.lowered(run, shapes).count(cuda.MOSAIC_CALL) == 1


@old
@pytest.mark.parametrize(
  'change, match',
  [
    (dict(dtype=jnp.float32), 'must be the same 16-bit float'),
    (dict(page=12), 'page 12: must be a power of two'),
    (dict(chunk=33, tree=True), 'a tree of 33 tokens: at most 32'),
  ],
)
def test_unsupported(change, match):
  """The error names what the kernel does not support."""
  given = {'chunk': 2, 'dtype': jnp.bfloat16, **change}
  one = case(np.random.default_rng(0), **given)
  with pytest.raises(ValueError, match=match):
    paged_attention.attend(*one, implementation='mosaic_gpu')


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason='for jax 0.10')
def test_old_jax():
  """On jax 0.10 the error says to use Triton."""
  one = case(np.random.default_rng(0), 1, dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match='use the Triton kernel'):
    paged_attention.attend(*one, implementation='mosaic_gpu')
