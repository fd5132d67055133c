"""QK-norm and RoPE in one pass: the reference against the definition in float64, the
kernels against the reference, values and gradients, and their split form (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import platforms
from m2jax.kernels import qk_norm_rope
from m2jax.kernels.qk_norm_rope import tpu
from tests.kernels import cuda

HEADS, DIM, ROTARY, EPS = 3, 128, 64, 1e-6
TOKENS = 37  # two blocks, the last cut short


@pytest.fixture
def small(interpreted, monkeypatch):
  """Kernels run as XLA loops on the CPU, with few tokens a block."""
  monkeypatch.setattr(tpu, '_block_tokens', lambda: 24)


def tensors(seed, dtype=np.float32, tokens=TOKENS, dim=DIM):
  """x, scale, cos, sin and a cotangent of the result."""
  rng = np.random.default_rng(seed)
  angle = rng.uniform(0, 7, (tokens, ROTARY * dim // DIM // 2))
  x, weight = rng.normal(size=(2, tokens, HEADS * dim))
  scale = rng.normal(size=HEADS * dim)
  wide = np.float64 if dtype == np.float64 else np.float32
  return (
    (3 * x).astype(dtype),
    scale.astype(wide),
    np.cos(angle).astype(wide),
    np.sin(angle).astype(wide),
    weight.astype(dtype),
  )


@functools.partial(jax.jit, static_argnames=('implementation', 'dim'))
def value_and_grads(x, scale, cos, sin, weight, implementation, variance=None, dim=DIM):
  """The result and the cotangents of x, scale and, where given, the variance."""

  def run(x, scale, variance):
    return qk_norm_rope.norm_rope(
      x,
      scale,
      cos,
      sin,
      head_dim=dim,
      eps=EPS,
      variance=variance,
      implementation=implementation,
    )

  out, vjp = jax.vjp(run, x, scale, variance)
  d_x, d_scale, d_variance = vjp(weight)
  return (out, d_x, d_scale) + (() if variance is None else (d_variance,))


def by_hand(x, scale, cos, sin):
  """The definition, number by number: mean square over all channels, then dims i and
  i + R/2 of each head as the parts of a complex number times e^(i·angle)."""
  x, scale, cos, sin = (np.asarray(a, np.float64) for a in (x, scale, cos, sin))
  y = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPS) * scale
  y = y.reshape(len(x), HEADS, -1)
  half = cos.shape[1]
  turned = y[..., :half] + 1j * y[..., half : 2 * half]
  turned *= (cos + 1j * sin)[:, None]
  y[..., :half], y[..., half : 2 * half] = turned.real, turned.imag
  return y.reshape(x.shape)


def test_reference():
  """The reference is the definition, its gradient that of finite differences."""
  with jax.enable_x64():
    *arrays, weight = tensors(0, np.float64, tokens=3, dim=8)
    out, d_x, d_scale = value_and_grads(*arrays, weight, 'reference', dim=8)
    np.testing.assert_allclose(out, by_hand(*arrays), atol=1e-12)
    rng = np.random.default_rng(1)
    x, scale = arrays[:2]
    dx, ds = rng.normal(size=x.shape), rng.normal(size=scale.shape)
    h = 1e-5
    up = by_hand(x + h * dx, scale + h * ds, *arrays[2:])
    down = by_hand(x - h * dx, scale - h * ds, *arrays[2:])
    slope = np.sum((up - down) / (2 * h) * weight)
    np.testing.assert_allclose(np.sum(d_x * dx) + np.sum(d_scale * ds), slope, 1e-7)


def check(
  arrays, implementation, tolerance, variance=None, run=value_and_grads, **more
):
  got = run(*arrays, implementation, variance, **more)
  wide = [a.astype(np.float32) for a in arrays]
  want = value_and_grads(*wide, 'reference', variance, **more)
  names = ('out', 'd_x', 'd_scale', 'd_variance')[: len(want)]
  for name, a, b in zip(names, got, want, strict=True):
    assert a.shape == b.shape
    assert a.dtype == (arrays[0].dtype if name in ('out', 'd_x') else jnp.float32)
    scale = np.abs(np.asarray(b)).max()
    np.testing.assert_allclose(
      np.float32(a), b, atol=tolerance * scale, rtol=0, err_msg=name
    )


@pytest.mark.parametrize('implementation', ['tpu', 'gpu'])
@pytest.mark.parametrize('tokens', [1, TOKENS])
def test_equals_reference(small, implementation, tokens):
  """Less than a block, and one with a rest; three heads are no power of two."""
  check(tensors(2, tokens=tokens), implementation, 2e-6)


@pytest.mark.parametrize('implementation', ['tpu', 'gpu'])
def test_bfloat16(small, implementation):
  """bf16 is rounded where the reference rounds: the same numbers but for a few, and
  gradients near those of fp32."""
  arrays = tensors(3, jnp.bfloat16)
  check(arrays, implementation, 0.02)
  got, want = (value_and_grads(*arrays, name)[0] for name in (implementation, 'cpu'))
  assert np.mean(np.float32(got) != np.float32(want)) < 0.01


@pytest.mark.parametrize('implementation', ['tpu', 'gpu'])
def test_variance_given(small, implementation):
  """The split form: the mean square comes from outside and takes a gradient."""
  variance = np.float32(np.random.default_rng(4).uniform(1, 9, (TOKENS, 1)))
  check(tensors(4), implementation, 2e-6, variance)


@pytest.mark.parametrize('implementation', ['cpu', 'tpu', 'gpu'])
def test_shards_are_the_whole(small, implementation):
  """Heads split over devices: shares normed by the mean of their mean squares, whose
  gradient goes back through that mean, give the values and gradients of the whole."""
  x, scale, cos, sin, weight = tensors(5)

  def split(x, scale):
    shares = jnp.split(x, HEADS, axis=1)
    squares = [jnp.mean(a * a, axis=1, keepdims=True) for a in shares]
    run = functools.partial(
      qk_norm_rope.norm_rope,
      cos=cos,
      sin=sin,
      head_dim=DIM,
      eps=EPS,
      variance=sum(squares) / HEADS,
      implementation=implementation,
    )
    return jnp.concatenate(
      [run(a, s) for a, s in zip(shares, jnp.split(scale, HEADS), strict=True)], axis=1
    )

  @jax.jit
  def run(x, scale, weight):
    out, vjp = jax.vjp(split, x, scale)
    return out, *vjp(weight)

  got = run(x, scale, weight)
  want = jax.device_get(value_and_grads(x, scale, cos, sin, weight, 'reference'))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_gpu_heads_of_any_size(small):
  """Where 24 channels are no power of two, filling is neither read nor written."""
  check(tensors(6, dim=8), 'gpu', 2e-6, dim=8)


@pytest.mark.long
@pytest.mark.parametrize(
  'split, cores, tokens',
  [
    (False, 1, TOKENS),
    (True, 1, TOKENS),
    # blocks that two cores cannot share equally
    (True, 2, 20),
    (False, 2, 60),
  ],
)
def test_simulated(small, simulated, split, cores, tokens):
  """On a simulated TPU no two accesses race, and nothing is read before it is
  written: not the tokens past the last either."""
  variance = jnp.full((tokens, 1), 2.0) if split else None
  with simulated(num_cores_or_threads=cores):
    check(tensors(7, tokens=tokens), 'tpu', 2e-6, variance)


@pytest.mark.parametrize('split', [False, pytest.param(True, marks=pytest.mark.long)])
def test_default_is_the_platforms(split):
  """Without a name two kernels are lowered for a TPU and for CUDA, none for a CPU nor
  where a kernel does not take the tensors."""

  def lowered(platform, dtype=jnp.bfloat16, dim=DIM):
    arrays = jax.eval_shape(lambda: tensors(8, dtype, dim=dim))
    variance = jax.ShapeDtypeStruct((TOKENS, 1), jnp.float32) if split else None
    run = functools.partial(value_and_grads.__wrapped__, implementation=None, dim=dim)
    if platform == 'cuda':
      return cuda.lowered(lambda *a: run(*a[:5], variance=a[5]), *arrays, variance)
    with platforms.any_platform():
      traced = jax.jit(lambda *a: run(*a[:5], variance=a[5])).trace(*arrays, variance)
    return traced.lower(lowering_platforms=(platform,)).as_text()

  assert lowered('tpu').count('tpu_custom_call') == 2
  assert lowered('cuda').count(cuda.CALL) == 2
  assert 'custom_call' not in lowered('cpu')
  with jax.enable_x64():
    assert lowered('tpu', jnp.float32).count('tpu_custom_call') == 2
    assert lowered('cuda', jnp.float32).count(cuda.CALL) == 2
  assert 'tpu_custom_call' not in lowered('tpu', dim=64)


def test_unsupported():
  """What cannot be computed is named."""
  x, scale, cos, sin, _ = tensors(9, dim=8)
  run = functools.partial(qk_norm_rope.norm_rope, x, scale, cos, sin, eps=EPS)
  with pytest.raises(ValueError, match='heads of 8 channels.*multiple of 128'):
    run(head_dim=8, implementation='tpu')
  with pytest.raises(ValueError, match='24 channels in heads of 7'):
    run(head_dim=7)
  with pytest.raises(ValueError, match="'fast'.*reference"):
    run(head_dim=8, implementation='fast')
