"""Forest attention: NumPy against plain softmax over each path, the reference and the
CPU implementation against NumPy, values and gradients (laws 1, 3, 7)."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.kernels import tree_attention
from m2jax.kernels.tree_attention import Visibility, cpu
from tests import cost

BLOCK = 128  # what odd sizes are odd to: queries and keys of a step on a CPU
LONG = 1025  # keys from which on its steps are longer
PLAN = jax.jit(cpu._plan, static_argnums=(0, 2))


def random_forest(rng, rows: int, length: int):
  """parent, subtree_end, position [rows, length] of random trees in depth-first order.

  Written apart from m2jax.forest: each token hangs on some token of the path before it,
  or is a root; the last tokens of a row are padding.
  """
  parent = np.full((rows, length), -1, np.int32)
  end = np.zeros((rows, length), np.int32)
  position = np.zeros((rows, length), np.int32)
  for row in range(rows):
    used = int(rng.integers(max(1, 2 * length // 3), length + 1))
    path = []
    for i in range(used):
      if path and rng.random() < 0.1:  # a branch point somewhere above, or a new tree
        path = path[: rng.integers(0, len(path) + 1)]
      parent[row, i] = path[-1] if path else -1
      position[row, i] = len(path)
      path.append(i)
    for i in range(used):  # every ancestor's subtree reaches at least to i
      j = i
      while j >= 0:
        end[row, j] = i + 1
        j = parent[row, j]
  return parent, end, position


ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 150, 4, 2, 8  # no size is even


def arrays(rng, rows, queries, keys, heads, kv_heads, dim, dtype=np.float32):
  """q, k, v and a cotangent of the output."""
  shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
  return [rng.normal(size=(rows, *s, dim)).astype(dtype) for s in shapes]


def tensors(rng, dtype=np.float32, queries=LENGTH, length=LENGTH):
  return arrays(rng, ROWS, queries, length, HEADS, KV_HEADS, DIM, dtype)


@functools.partial(jax.jit, static_argnames=('implementation', 'window', 'sinks'))
def value_and_grads(q, k, v, weight, end, implementation, **more):
  """The output and the cotangents of q, k and v under `weight`."""

  def run(q, k, v):
    seen = Visibility(end, **more)
    return tree_attention.attend(q, k, v, seen, implementation=implementation)

  out, vjp = jax.vjp(run, q, k, v)
  return out, *vjp(weight)


def visible(end, q_index, window=None, sinks=0, q_position=None, k_position=None):
  """[B, Q, S]: which keys each query sees."""
  keys, q = np.arange(end.shape[1]), q_index[:, :, None]
  seen = (keys <= q) & (q < end[:, None])
  if window is not None:
    far = k_position[:, None]
    seen &= (q_position[:, :, None] - far < window) | (far < sinks)
  return seen


def by_hand(q, k, v, weight, end, q_index=None, **more):
  """The same four arrays in float64 NumPy, every score at once."""
  q, k, v, weight = (np.asarray(x, np.float64) for x in (q, k, v, weight))
  rows, queries, heads, dim = q.shape
  if q_index is None:
    q_index = np.tile(np.arange(queries), (rows, 1))
  # [B, K, G, Q, H] and [B, K, 1, S, H]
  of_query = lambda x: np.moveaxis(x.reshape(rows, queries, k.shape[2], -1, dim), 1, 3)
  of_key = lambda x: x.swapaxes(1, 2)[:, :, None]
  q, k, v, weight = of_query(q), of_key(k), of_key(v), of_query(weight)
  seen = visible(end, q_index, **more)[:, None, None]
  scores = np.where(seen, q @ k.swapaxes(3, 4) * dim**-0.5, -np.inf)
  top = scores.max(-1, keepdims=True)
  weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
  weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
  out = weights @ v
  d_scores = weight @ v.swapaxes(3, 4) - np.sum(out * weight, -1, keepdims=True)
  d_scores *= weights * dim**-0.5
  to_query = lambda x: np.moveaxis(x, 3, 1).reshape(rows, queries, heads, dim)
  to_key = lambda x: x.sum(2).swapaxes(1, 2)
  d_k, d_v = d_scores.swapaxes(3, 4) @ q, weights.swapaxes(3, 4) @ weight
  return to_query(out), to_query(d_scores @ k), to_key(d_k), to_key(d_v)


def check(inputs, end, implementation, *, atol=3e-6, run=value_and_grads, **more):
  """The output and every gradient are those by hand, for inputs of 16 bits of their
  exact values."""
  got = run(*inputs, end, implementation=implementation, **more)
  want = by_hand(*inputs, end, **more)
  for name, a, b in zip(('out', 'd_q', 'd_k', 'd_v'), got, want, strict=True):
    assert a.dtype == inputs[0].dtype, name
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(
      np.float64(a), b, atol=atol * scale, rtol=0, err_msg=f'{implementation} {name}'
    )
  return jax.device_get(got)


def softmax_over_paths(q, k, v, parent, scale):
  """Plain causal attention of every path, token by token, in float64 NumPy."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for row, i, head in np.ndindex(*q.shape[:3]):
    path, j = [], i
    while j >= 0:
      path.append(j)
      j = parent[row, j]
    scores = k[row, path, head // group] @ q[row, i, head] * scale
    weights = np.exp(scores - scores.max())
    out[row, i, head] = weights @ v[row, path, head // group] / weights.sum()
  return out


@given(seed=st.integers(0, 2**32 - 1))
def test_by_hand_is_softmax_over_each_path(seed):
  """What everything else is compared with sees exactly the ancestors."""
  rng = np.random.default_rng(seed)
  parent, end, _ = random_forest(rng, 2, 24)
  q, k, v, weight = arrays(rng, 2, 24, 24, 4, 2, 4)
  want = softmax_over_paths(q, k, v, parent, scale=4**-0.5)
  want[end == 0] = 0  # padding sees nothing
  np.testing.assert_allclose(by_hand(q, k, v, weight, end)[0], want, atol=1e-12)


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
@given(seed=st.integers(0, 2**32 - 1))
def test_random_trees(implementation, seed):
  """Values and gradients on rows of random trees, padded at the end."""
  rng = np.random.default_rng(seed)
  check(tensors(rng), random_forest(rng, ROWS, LENGTH)[1], implementation)


@pytest.mark.parametrize(
  'rows, length, heads, kv_heads', [(1, 1, 2, 2), (2, BLOCK, 4, 1), (1, LONG, 2, 1)]
)
def test_sizes(rows, length, heads, kv_heads):
  """One token; exactly one step; a long row: several, plus one token."""
  rng = np.random.default_rng(length)
  _, end, _ = random_forest(rng, rows, length)
  check(arrays(rng, rows, length, length, heads, kv_heads, 4), end, 'cpu')


@pytest.mark.parametrize('queries', [LENGTH, 70])
def test_along_the_path(queries):
  """'invariant' has the same values and gradients, of all queries or the last ones."""
  rng = np.random.default_rng(queries)
  _, end, position = random_forest(rng, ROWS, LENGTH)
  index = np.tile(np.arange(LENGTH - queries, LENGTH, dtype=np.int32), (ROWS, 1))
  places = dict(q_position=position[:, -queries:], k_position=position)
  check(tensors(rng, queries=queries), end, 'invariant', q_index=index, **places)


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_float64(implementation):
  """In float64 nothing is computed in less: the exactness tests stand on this."""
  with jax.enable_x64():
    rng = np.random.default_rng(0)
    _, end, _ = random_forest(rng, ROWS, LENGTH)
    check(tensors(rng, np.float64), end, implementation, atol=1e-13)


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_bfloat16(implementation):
  """bf16 inputs accumulate in fp32: the results are near those of exact sums."""
  rng = np.random.default_rng(1)
  _, end, _ = random_forest(rng, ROWS, LENGTH)
  low = tensors(rng, jnp.bfloat16)
  got = value_and_grads(*low, end, implementation=implementation)
  for a, b in zip(got, by_hand(*low, end), strict=True):
    assert a.dtype == jnp.bfloat16
    error = np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)
    assert error < 0.02, error


@pytest.mark.parametrize(
  'implementation, keys, window, sinks',
  [
    ('cpu', LENGTH, None, 0),
    ('cpu', LENGTH, 9, 3),
    pytest.param('cpu', LONG, 9, 0, marks=pytest.mark.long),
    ('reference', LENGTH, None, 0),
    ('reference', LENGTH, 9, 3),
  ],
)
def test_query_subsets_and_windows(implementation, keys, window, sinks):
  """Queries at any indices, in any order; windows and sinks count positions, not
  indices: two branches of one stem see the same far ancestors."""
  rng = np.random.default_rng(3)
  _, end, position = random_forest(rng, 2, keys)
  index = np.stack([rng.permutation(keys)[:70] for _ in range(2)]).astype(np.int32)
  more = dict(q_index=index)
  if window is not None:
    more |= dict(window=window, sinks=sinks, k_position=position)
    more |= dict(q_position=np.take_along_axis(position, index, 1))
  check(tensors(rng, queries=70, length=keys), end, implementation, **more)


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_empty_rows(implementation):
  """A query that sees no key gives exactly 0 and no gradient, and spoils no other;
  huge scores neither overflow nor leak past the mask."""
  rng = np.random.default_rng(4)
  for hidden in range(ROWS):
    q, k, v, weight = tensors(rng)
    _, end, _ = random_forest(rng, ROWS, LENGTH)
    end[hidden] = 0  # a row of padding
    end[1 - hidden, :5] = 0  # tokens that see nothing before ones that do, as in MTP
    q[1 - hidden] *= 1e3 if hidden else 1
    got = value_and_grads(q, k, v, weight, end, implementation=implementation)
    out, *grads = jax.device_get(got)
    for x in (out, *grads):
      assert np.all(np.isfinite(x))
      assert not np.any(x[hidden])
      assert not np.any(x[1 - hidden, :5])
    assert np.any(out[1 - hidden, 5:])


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_branches_do_not_touch(implementation):
  """What cannot be seen has gradient exactly 0, and changing it changes no bit, though
  the branches lie in the same block."""
  rng = np.random.default_rng(5)
  q, k, v, _ = tensors(rng)
  stem, middle, stop = 40, 75, 110
  end = np.zeros((ROWS, LENGTH), np.int32)
  end[:, :stem], end[:, stem:middle], end[:, middle:stop] = stop, middle, stop
  first = slice(stem, middle)
  weight = np.zeros_like(q)
  weight[:, first] = 1.0  # a loss on the first branch only
  run = functools.partial(value_and_grads, implementation=implementation)
  before = jax.device_get(run(q, k, v, weight, end))
  for x in before[1:]:
    assert not np.any(x[:, middle:])
    assert np.any(x[:, first])
  assert np.any(before[2][:, :stem])
  for x in (q, k, v):
    x[:, middle:stop] *= -3.0
  after = jax.device_get(run(q, k, v, weight, end))
  for a, b in zip(before, after, strict=True):
    np.testing.assert_array_equal(a[:, :middle], b[:, :middle])


def largest_buffer(implementation: str, length: int) -> int:
  """Elements of the largest array in the compiled forward and backward pass."""
  shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
  kv = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
  end = jax.ShapeDtypeStruct((1, length), jnp.int32)
  lowered = value_and_grads.lower(
    shape, kv, kv, shape, end, implementation=implementation
  )
  found = re.findall(r'\b(?:f32|s32|pred)\[([\d,]+)\]', lowered.compile().as_text())
  return max(int(np.prod([int(n) for n in dims.split(',')])) for dims in found)


def test_scores_never_exist_at_once():
  """Memory grows with S, not S²: no compiled buffer reaches S·S elements, neither
  forward nor backward. The reference's does, so the count can see it."""
  length = 1024
  assert largest_buffer('reference', length) >= length**2
  assert largest_buffer('cpu', length) < length**2 // 2


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_scale(implementation):
  """`scale` replaces H ** -0.5, also where it is 0: every ancestor weighs the same."""
  rng = np.random.default_rng(6)
  q, k, v, _ = arrays(rng, 1, 12, 12, 2, 2, 4)
  mean = np.cumsum(v, axis=1) / np.arange(1, 13)[None, :, None, None]
  run = functools.partial(tree_attention.attend, scale=0.0)
  run = jax.jit(functools.partial(run, implementation=implementation))
  out = run(q, k, v, Visibility(np.full((1, 12), 12, np.int32)))
  np.testing.assert_allclose(out, mean, atol=1e-6)


def test_default_is_the_platforms():
  """Without a name the CPU implementation is lowered on a CPU: the same program."""
  shapes = [jax.ShapeDtypeStruct((1, 12, 2, 4), np.float32)] * 4
  shapes += [jax.ShapeDtypeStruct((1, 12), np.int32)]
  default, cpu_, reference_ = (
    value_and_grads.lower(*shapes, implementation=name).as_text()
    for name in (None, 'cpu', 'reference')
  )
  assert default == cpu_ != reference_


def test_errors():
  """A wrong name and a window without positions are refused by name."""
  q = jnp.zeros((1, 4, 2, 4))
  end = jnp.full((1, 4), 4)
  with pytest.raises(ValueError, match='implementation=.*gpu9'):
    tree_attention.attend(q, q, q, Visibility(end), implementation='gpu9')
  with pytest.raises(ValueError, match='k_position'):
    tree_attention.attend(q, q, q, Visibility(end, window=2))


def test_shift_is_each_querys_own():
  """Scores too large for exp without a shift, in another row, send all queries through
  the loop that finds it: those that need none keep every bit."""
  rng = np.random.default_rng(9)
  q, k, v, weight = tensors(rng)
  _, end, _ = random_forest(rng, ROWS, LENGTH)
  plain = check([q, k, v, weight], end, 'cpu')
  q[1] *= 300.0
  assert np.abs(q).max() > 100  # exp(100) is beyond float32
  # scores of thousands are rounded in the fourth digit after the point
  shifted = check([q, k, v, weight], end, 'cpu', atol=1e-3)
  for a, b in zip(plain, shifted, strict=True):
    np.testing.assert_array_equal(a[0], b[0])


@given(seed=st.integers(0, 2**32 - 1))
def test_plan_lists_what_is_seen(seed):
  """The blocks of keys gathered for a block of queries are those of which it sees
  something, each once, and only the last of its steps is not full."""
  rng = np.random.default_rng(seed)
  rows, length, block_q, b, step_blocks = 2, 512, 64, 16, 3
  _, end, _ = random_forest(rng, rows, length)
  per_row = length // b
  index = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
  static = cpu._Static(rows, block_q, b, per_row, step_blocks)
  found = PLAN(static, Visibility(end, index), 1)
  seen = visible(end, index)
  seen = seen.reshape(rows, length // block_q, block_q, per_row, b).any((2, 4))
  padding = rows * per_row
  for row, block in np.ndindex(*seen.shape[:2]):
    mine = np.asarray(found.query[: found.count]) == row * (length // block_q) + block
    keys = np.asarray(found.keys)[: found.count][mine]
    listed = [k - row * per_row for k in keys.reshape(-1) if k != padding]
    assert listed == np.flatnonzero(seen[row, block]).tolist()
    assert not np.any(keys[:-1] == padding)


@pytest.mark.long
@pytest.mark.parametrize('what', ['documents', 'window'])
def test_blocks_are_skipped(what):
  """Law 7: short documents in a long row, or a short window on a long one, cost far
  less than one long document."""
  length, document = 4096, 128
  rng = np.random.default_rng(8)
  inputs = arrays(rng, 1, length, length, 2, 1, 16)
  whole = np.full((1, length), length, np.int32)
  packed = ((np.arange(length) // document + 1) * document).astype(np.int32)[None]

  position = np.arange(length, dtype=np.int32)[None]

  def run(end, **more):
    more |= dict(k_position=position, q_position=position, implementation='cpu')
    return value_and_grads(*inputs, end, **more)

  less = {
    'window': lambda: run(whole, window=document, sinks=1),
    'documents': lambda: run(packed),
  }[what]
  assert cost.ratio(less, lambda: run(whole)) < 1 / 3  # measured: about 1/10
