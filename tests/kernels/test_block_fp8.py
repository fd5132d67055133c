"""Block FP8: NumPy and ml_dtypes in float64, a tile at a time, are the reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.config import PLAIN, Matmuls
from m2jax.kernels import block_fp8
from m2jax.kernels.block_fp8 import blocks
from tests import jaxprs
from tests.kernels import cuda

FP8 = Matmuls('block_fp8')
TILES = (blocks.TOKEN, blocks.TOKENS, blocks.WEIGHT)
# T, D, F: short tiles at the end of each axis; less than one tile; whole tiles
SHAPES = ((130, 140, 200), (3, 5, 7), (128, 256, 128))
KINDS = (
  FP8,
  Matmuls('block_fp8', power_of_two=True),
  Matmuls('block_fp8', clip=0.25),
)


def rounded(x, tile, how=FP8):
  """x in e4m3 and back, in float64, by loops over tiles."""
  out = np.zeros(x.shape)
  for i in range(0, x.shape[0], tile[0]):
    for j in range(0, x.shape[1], tile[1]):
      at = slice(i, i + tile[0]), slice(j, j + tile[1])
      scale = np.float32(np.abs(x[at]).max()) * np.float32(1 / 448)
      if how.power_of_two and scale > 0:
        scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
      if scale > 0:
        values = np.clip(x[at] / scale, -448 * how.clip, 448 * how.clip)
        out[at] = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
  return out


def by_hand(x, w, d_out, how=FP8):
  """out, d_x and d_w, each of operands rounded by hand."""
  token, tokens, weight = blocks.TOKEN, blocks.TOKENS, blocks.WEIGHT
  r = lambda a, tile: rounded(np.asarray(a), tile, how)
  return (
    r(x, token) @ r(w, weight),
    r(d_out, token) @ r(w, weight).T,
    r(x, tokens).T @ r(d_out, tokens),
  )


@functools.partial(jax.jit, static_argnums=(3, 4))
def value_and_grads(x, w, d_out, how, implementation=None):
  f = lambda x, w: block_fp8.dot(x, w, how, implementation=implementation)
  out, vjp = jax.vjp(f, x, w)
  return out, *vjp(d_out)


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantized(x, tile, how=FP8):
  """Blocks, what they stand for in fp32, and the scale of each value."""
  found = block_fp8.quantize(x, tile, how)
  return (
    found,
    found.astype(jnp.float32),
    blocks.spread(found.scale, tile, x.shape),
  )


def arrays(shape, seed=0, spread=2.0):
  """x, w and d_out whose magnitudes differ by `spread` e-folds."""
  rng, (T, D, F) = np.random.default_rng(seed), shape
  many = lambda *s: rng.normal(size=s) * np.exp(spread * rng.normal(size=s))
  return [np.float32(many(*s)) for s in ((T, D), (D, F), (T, F))]


def assert_close(got, want, tolerance):
  for a, b in zip(got, want, strict=True):
    error = np.linalg.norm(np.float64(a) - b) / max(np.linalg.norm(b), 1e-30)
    assert error < tolerance, error


@pytest.mark.parametrize(
  ('shape', 'how'),
  [
    *((SHAPES[0], how) for how in KINDS),
    *((shape, FP8) for shape in SHAPES[1:]),
    *(
      pytest.param(shape, how, marks=pytest.mark.long)
      for shape in SHAPES[1:]
      for how in KINDS[1:]
    ),
  ],
  ids=str,
)
def test_value_and_gradients(shape, how):
  """Both implementations are the emulation, to fp32 sums: no other rounding."""
  given_ = arrays(shape)
  want = by_hand(*given_, how)
  for implementation in ('reference', 'native'):
    assert_close(value_and_grads(*given_, how, implementation), want, 1e-6)


@pytest.mark.parametrize('tile', TILES, ids=str)
def test_every_value_is_as_ml_dtypes_casts_it(tile):
  """Bit for bit, over all binades, subnormals of e4m3 included."""
  x, *_ = arrays((130, 140, 1), spread=6.0)
  found, _, scale = jax.device_get(quantized(x, tile))
  want = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
  np.testing.assert_array_equal(np.asarray(found.values), want)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(-60, 60), st.integers(1, 140), st.booleans())
def test_powers_of_two_scale_exactly(seed, exponent, rows, power_of_two):
  """x·2^k rounds to Q(x)·2^k: gradients of 1e-12 lose nothing, unlike with a floor."""
  how = dataclasses.replace(FP8, power_of_two=power_of_two)
  x = np.zeros((140, 130), np.float32)
  x[:rows] = np.random.default_rng(seed).normal(size=(rows, 130))
  factor = np.float32(2.0**exponent)
  for tile in TILES:
    one, other = (np.asarray(quantized(a, tile, how)[1]) for a in (x, x * factor))
    np.testing.assert_array_equal(one * factor, other)
    assert np.abs(one - x).max() <= np.abs(x).max() / 16


def test_zeros_are_zeros():
  """A tile of zeros beside others, and all zeros: no 0/0."""
  x, w, d_out = arrays((128, 256, 128))
  x[:, :128] = 0
  assert_close(value_and_grads(x, w, d_out, FP8), by_hand(x, w, d_out), 1e-6)
  for array in value_and_grads(*map(np.zeros_like, (x, w, d_out)), FP8):
    np.testing.assert_array_equal(array, 0)


@pytest.mark.parametrize('bad', (np.nan, np.inf, -np.inf))
def test_not_a_number_stays_one(bad):
  """A NaN or infinity makes its tile NaN, and so its row: no loss looks finite."""
  x, w, d_out = arrays((4, 256, 8))
  x[1, 3] = bad
  out, d_x, d_w = jax.device_get(value_and_grads(x, w, d_out, FP8))
  assert np.isnan(out[1]).all() and np.isfinite(np.delete(out, 1, 0)).all()
  assert np.isfinite(d_x).all()
  assert np.isnan(d_w[3]).all() and np.isfinite(np.delete(d_w, 3, 0)).all()


def test_the_largest_do_not_overflow():
  """Rounding x/scale up past 448 would give NaN in e4m3fn; the clamp is before it."""
  rng = np.random.default_rng(0)
  x = np.float32(rng.normal(size=(2000, 1)) * 2.0 ** rng.integers(-80, 80, (2000, 1)))
  for how in KINDS:
    found, values, _ = jax.device_get(quantized(x, blocks.TOKEN, how))
    assert np.isfinite(values).all()
    assert np.abs(np.float32(found.values)).max() <= 448 * how.clip


def test_bfloat16_operands_are_exact_with_powers_of_two():
  """The matmuls have no fp32 operand, which a TPU would split into three."""
  given_ = [a.astype(jnp.bfloat16) for a in arrays((130, 140, 72))]
  how = KINDS[1]
  got = value_and_grads(*given_, how, 'reference')
  assert all(a.dtype == jnp.bfloat16 for a in got)
  want = by_hand(*(np.float64(np.float32(a)) for a in given_), how)
  assert_close(got, want, 2.0**-8)  # of the results' rounding
  traced = jax.make_jaxpr(lambda *a: value_and_grads(*a, how, 'reference'))(*given_)
  dots = [
    e for e in jaxprs.equations(traced.jaxpr) if e.primitive.name == 'dot_general'
  ]
  assert len(dots) == 3
  assert all(x.aval.dtype == jnp.bfloat16 for dot in dots for x in dot.invars)


@pytest.mark.parametrize('kind', ('block_fp8', 'activations_int8', 'activations_int4'))
def test_grouped_is_dot_by_group(kind):
  """Value and gradients; tiles along tokens begin at a group's first row."""
  sizes, how = (130, 0, 3, 200), Matmuls(kind)
  rows, _, d_out = arrays((340, 20, 24))  # 7 rows are past the sum of the sizes
  w = np.stack([arrays((1, 20, 24), seed)[1] for seed in range(len(sizes))])

  @jax.jit
  def run(rows, w, d_out):
    f = lambda rows, w: block_fp8.grouped(rows, w, jnp.array(sizes), how)
    out, vjp = jax.vjp(f, rows, w)
    return out, *vjp(d_out)

  out, d_rows, d_w = jax.device_get(run(rows, w, d_out))
  start = 0
  for group, size in enumerate(sizes):
    at = slice(start, start + size)
    start += size
    if not size:
      np.testing.assert_array_equal(d_w[group], 0)
      continue
    want = value_and_grads(rows[at], w[group], d_out[at], how)
    for a, b in zip((out[at], d_rows[at], d_w[group]), want, strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max())
  np.testing.assert_array_equal(out[start:], 0)
  np.testing.assert_array_equal(d_rows[start:], 0)


@pytest.mark.parametrize('bits', (4, 8))
def test_saved_activations_only_reach_the_weights_gradient(bits):
  """Forward and d_x are plain, bit for bit; d_w is of activations in integers."""
  x, w, d_out = arrays((9, 33, 17), spread=0.5)
  how = Matmuls(f'activations_int{bits}')
  got, plain = (jax.device_get(value_and_grads(x, w, d_out, m)) for m in (how, PLAIN))
  for i in (0, 1):
    np.testing.assert_array_equal(got[i], plain[i])
  x64 = np.float64(x)
  step = np.abs(x64).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
  want = (np.round(x64 / step) * step).T @ np.float64(d_out)
  assert_close(got[2:], [want], 1e-5)
  assert np.linalg.norm(got[2] - plain[2]) > 1e-4 * np.linalg.norm(plain[2])


def test_stored_blocks():
  """Stored blocks are not rounded again; plain matmuls read them dequantised."""
  x, w, _ = arrays((5, 200, 140))
  stored, matrix, _ = quantized(w, blocks.WEIGHT)
  assert stored.shape == w.shape and len(stored) == 200
  matrix = np.float64(matrix)

  @functools.partial(jax.jit, static_argnums=2)
  def products(x, stored, how):
    one = jax.tree.map(lambda a: a[None], stored)
    grouped = block_fp8.grouped(x, one, jnp.array([5]), how)
    return block_fp8.dot(x, stored, how), grouped

  for how in KINDS[:2]:
    want = rounded(x, blocks.TOKEN, how) @ matrix
    dot, grouped = products(x, stored, how)
    assert_close([dot], [want], 1e-6)
    assert_close([grouped], [want], 1e-5)
  plain = np.float64(x) @ matrix
  assert_close([jax.jit(block_fp8.dot)(x, stored)], [plain], 1e-6)


@pytest.mark.parametrize('platform', ('cuda', 'tpu'))
def test_the_native_product_lowers_to_dots_of_e4m3(platform):
  """Forward and both gradients, at M2's sizes. Lowered, not run."""
  like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  shapes = like(4096, 3072), like(3072, 1536), like(4096, 1536)
  run = lambda *a: value_and_grads(*a, FP8, 'native')
  if platform == 'cuda':
    text = cuda.lowered(run, *shapes)
  else:
    text = jax.export.export(jax.jit(run), platforms=['tpu'])(*shapes).mlir_module()
  dots = [line for line in text.splitlines() if 'stablehlo.dot_general' in line]
  assert len(dots) == 3 and all(line.count('f8E4M3FN') == 2 for line in dots)


def test_an_unknown_implementation_or_kind_is_named():
  x, w, _ = arrays((1, 2, 3))
  with pytest.raises(ValueError, match="implementation='tensor cores'"):
    block_fp8.dot(x, w, FP8, implementation='tensor cores')
  with pytest.raises(ValueError, match=r"Matmuls.kind='fp4'"):
    Matmuls('fp4')
  with pytest.raises(ValueError, match='Matmuls.clip=0.5'):
    Matmuls(clip=0.5)
