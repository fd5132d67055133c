"""Forest attention: the reference against plain softmax over each path, the CPU
implementation against the reference, values and gradients (laws 1, 3, 7)."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.kernels import tree_attention
from m2jax.kernels.tree_attention import Visibility, cpu, reference
from tests import cost

BLOCK = 128  # what odd sizes are odd to: queries and keys of a step on a CPU
LONG = 1025  # keys from which on its steps are longer


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


def arrays(rng, rows, queries, keys, heads, kv_heads, dim, dtype=np.float32):
  """q, k, v and a cotangent of the output."""
  shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
  return [jnp.array(rng.normal(size=(rows, *s, dim)), dtype) for s in shapes]


@functools.partial(jax.jit, static_argnames=('implementation', 'window', 'sinks'))
def value_and_grads(q, k, v, weight, end, implementation, **more):
  """The output and the cotangents of q, k and v under `weight`."""

  def loss(q, k, v):
    seen = Visibility(end, **more)
    out = tree_attention.attend(q, k, v, seen, implementation=implementation)
    return jnp.sum(
      (out * weight).astype(jnp.promote_types(out.dtype, jnp.float32))
    ), out

  (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return (out, *grads)


def assert_same(tensors, end, *, atol, **more):
  """The two implementations agree on the output and on every gradient."""
  got = value_and_grads(*tensors, end, implementation='cpu', **more)
  want = value_and_grads(*tensors, end, implementation='reference', **more)
  for name, a, b in zip(('out', 'd_q', 'd_k', 'd_v'), got, want, strict=True):
    assert a.dtype == b.dtype, name
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.all(np.isfinite(a)), name
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(a, b, atol=atol * scale, rtol=0, err_msg=name)


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
@settings(max_examples=15)
def test_reference_is_softmax_over_each_path(seed):
  """The reference sees exactly the ancestors: it is what everything else is held to."""
  rng = np.random.default_rng(seed)
  parent, end, _ = random_forest(rng, 2, 24)
  q, k, v, weight = arrays(rng, 2, 24, 24, 4, 2, 4)
  out = value_and_grads(q, k, v, weight, end, implementation='reference')[0]
  want = softmax_over_paths(q, k, v, parent, scale=4**-0.5)
  want[end == 0] = 0  # padding sees nothing
  np.testing.assert_allclose(out, want, atol=1e-5)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12)
def test_cpu_equals_reference(seed):
  """Three rows of random trees, six query heads on two, 150 tokens: no size is even."""
  rng = np.random.default_rng(seed)
  _, end, _ = random_forest(rng, 3, 150)
  assert_same(arrays(rng, 3, 150, 150, 6, 2, 8), end, atol=3e-6)


@pytest.mark.parametrize(
  'rows, length, heads, kv_heads',
  [(1, 1, 2, 2), (2, BLOCK, 4, 1), (3, 6 * BLOCK + 1, 2, 2), (2, LONG, 4, 2)],
)
def test_sizes(rows, length, heads, kv_heads):
  """One token; exactly one step; several, plus one token; a long row."""
  rng = np.random.default_rng(length)
  _, end, _ = random_forest(rng, rows, length)
  assert_same(arrays(rng, rows, length, length, heads, kv_heads, 4), end, atol=3e-6)


def test_float64():
  """In float64 nothing is computed in less: the exactness tests stand on this."""
  with jax.enable_x64():
    rng = np.random.default_rng(0)
    _, end, _ = random_forest(rng, 2, 100)
    assert_same(arrays(rng, 2, 100, 100, 4, 2, 8, np.float64), end, atol=1e-13)


def test_bfloat16():
  """bf16 inputs accumulate in fp32: both implementations stay near the fp32 result."""
  rng = np.random.default_rng(1)
  _, end, _ = random_forest(rng, 2, 150)
  low = arrays(rng, 2, 150, 150, 4, 2, 8, jnp.bfloat16)
  exact = value_and_grads(
    *(x.astype(jnp.float32) for x in low), end, implementation='reference'
  )
  for implementation in ('cpu', 'reference'):
    got = value_and_grads(*low, end, implementation=implementation)
    for a, b in zip(got, exact, strict=True):
      assert a.dtype == jnp.bfloat16
      error = np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)
      assert error < 0.02, (implementation, error)


@pytest.mark.parametrize('keys', [150, LONG])
@pytest.mark.parametrize('window, sinks', [(None, 0), (9, 0), (9, 3)])
def test_query_subsets_and_windows(window, sinks, keys):
  """Queries at any indices, in any order; windows and sinks count positions, not
  indices: two branches of one stem see the same far ancestors."""
  rng = np.random.default_rng(3)
  _, end, position = random_forest(rng, 2, keys)
  index = np.stack([rng.permutation(keys)[:70] for _ in range(2)]).astype(np.int32)
  tensors = arrays(rng, 2, 70, keys, 4, 2, 8)
  more = dict(q_index=index)
  if window is not None:
    more |= dict(window=window, sinks=sinks, k_position=position)
    more |= dict(q_position=np.take_along_axis(position, index, 1))
  assert_same(tensors, end, atol=3e-6, **more)
  # and the reference against a mask written out pair by pair
  out = value_and_grads(*tensors, end, implementation='reference', **more)[0]
  q, k, v, _ = (np.asarray(x, np.float64) for x in tensors)
  for row, i in np.ndindex(2, 70):
    at = index[row, i]
    seen = [
      j
      for j in range(at + 1)
      if at < end[row, j]
      and (
        window is None
        or position[row, at] - position[row, j] < window
        or position[row, j] < sinks
      )
    ]
    for head in range(4):
      if not seen:
        assert not np.any(out[row, i, head])
        continue
      weights = np.exp(k[row, seen, head // 2] @ q[row, i, head] * 8**-0.5)
      want = weights @ v[row, seen, head // 2] / weights.sum()
      np.testing.assert_allclose(out[row, i, head], want, atol=1e-5)


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_empty_rows(implementation):
  """A query that sees no key gives exactly 0 and no gradient, and spoils no other;
  huge scores neither overflow nor leak past the mask."""
  rng = np.random.default_rng(4)
  q, k, v, weight = arrays(rng, 3, 150, 150, 6, 2, 8)
  _, end, _ = random_forest(rng, 3, 150)
  end[0] = 0  # a row of padding
  end[1, :5] = 0  # tokens that see nothing before ones that do, as in an MTP module
  q = q.at[2].multiply(1e3)
  out, d_q, d_k, d_v = value_and_grads(
    q, k, v, weight, end, implementation=implementation
  )
  for x in (out, d_q, d_k, d_v):
    assert np.all(np.isfinite(x))
    assert not np.any(x[0])
    assert not np.any(x[1, :5])
  assert np.any(out[1, 5:])


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_branches_do_not_touch(implementation):
  """What cannot be seen has gradient exactly 0, and changing it changes no bit, though
  the branches lie in the same block."""
  rng = np.random.default_rng(5)
  q, k, v, _ = arrays(rng, 3, 150, 150, 6, 2, 8)
  stem, middle, stop = 40, 75, 110
  end = np.zeros((3, 150), np.int32)
  end[:, :stem], end[:, stem:middle], end[:, middle:stop] = stop, middle, stop
  first = slice(stem, middle)
  weight = jnp.zeros_like(q).at[:, first].set(1.0)  # a loss on the first branch only
  out, d_q, d_k, d_v = value_and_grads(
    q, k, v, weight, end, implementation=implementation
  )
  for x in (d_q, d_k, d_v):
    assert not np.any(x[:, middle:])
    assert np.any(x[:, first])
  assert np.any(d_k[:, :stem])
  moved = [x.at[:, middle:stop].multiply(-3.0) for x in (q, k, v)]
  after = value_and_grads(*moved, weight, end, implementation=implementation)
  for a, b in zip((out, d_q, d_k, d_v), after, strict=True):
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


def test_scale():
  """`scale` replaces H ** -0.5, also where it is 0: every ancestor weighs the same."""
  rng = np.random.default_rng(6)
  q, k, v, _ = arrays(rng, 1, 12, 12, 2, 2, 4)
  end = np.full((1, 12), 12, np.int32)
  mean = np.cumsum(v, axis=1) / np.arange(1, 13)[None, :, None, None]
  seen = Visibility(end)
  for implementation in ('cpu', 'reference'):
    out = tree_attention.attend(q, k, v, seen, scale=0.0, implementation=implementation)
    np.testing.assert_allclose(out, mean, atol=1e-6)


def test_default_is_the_platforms():
  """Without a name the CPU implementation is lowered on a CPU: bit-identical to it."""
  rng = np.random.default_rng(7)
  _, end, _ = random_forest(rng, 3, 150)
  tensors = arrays(rng, 3, 150, 150, 6, 2, 8)
  named = value_and_grads(*tensors, end, implementation='cpu')
  default = value_and_grads(*tensors, end, implementation=None)
  for a, b in zip(named, default, strict=True):
    np.testing.assert_array_equal(a, b)


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
  q, k, v, weight = arrays(rng, 2, 150, 150, 4, 2, 8)
  _, end, _ = random_forest(rng, 2, 150)
  plain = value_and_grads(q, k, v, weight, end, implementation='cpu')
  huge = q.at[1].multiply(300.0)
  assert float(jnp.max(jnp.abs(huge))) > 100  # exp(100) is beyond float32
  shifted = value_and_grads(huge, k, v, weight, end, implementation='cpu')
  for a, b in zip(plain, shifted, strict=True):
    np.testing.assert_array_equal(a[0], b[0])
  # scores of thousands are rounded in the fourth digit after the point
  assert_same([huge, k, v, weight], end, atol=1e-3)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_plan_lists_what_is_seen(seed):
  """The blocks of keys gathered for a block of queries are those of which it sees
  something, each once, and only the last of its steps is not full."""
  rng = np.random.default_rng(seed)
  rows, length, block_q, b, step_blocks = 2, 512, 64, 16, 3
  _, end, _ = random_forest(rng, rows, length)
  per_row = length // b
  static = cpu._Static(rows, block_q, b, per_row, step_blocks)
  index = Visibility(end).complete(length)
  plan = cpu._plan(static, index, group=1)
  seen = np.asarray(reference.visible(index))
  seen = seen.reshape(rows, length // block_q, block_q, per_row, b).any((2, 4))
  padding = rows * per_row
  for row, block in np.ndindex(*seen.shape[:2]):
    mine = np.asarray(plan.query[: plan.count]) == row * (length // block_q) + block
    keys = np.asarray(plan.keys[: plan.count])[mine]
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
  tensors = arrays(rng, 1, length, length, 2, 1, 16)
  whole = np.full((1, length), length, np.int32)
  packed = ((np.arange(length) // document + 1) * document).astype(np.int32)[None]

  position = np.arange(length, dtype=np.int32)[None]

  def run(end, **more):
    more |= dict(k_position=position, q_position=position, implementation='cpu')
    return value_and_grads(*tensors, end, **more)

  less = {
    'window': lambda: run(whole, window=document, sinks=1),
    'documents': lambda: run(packed),
  }[what]
  assert cost.ratio(less, lambda: run(whole)) < 1 / 3  # measured: about 1/10
