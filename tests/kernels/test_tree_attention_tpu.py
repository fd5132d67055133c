"""The TPU kernel of forest attention, interpreted on the CPU with small blocks: values
and gradients against NumPy, its block pairs, and what it lowers to (law 7)."""

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
from m2jax.kernels import tree_attention
from m2jax.kernels.tree_attention import Visibility, tpu
from m2jax.kernels.tree_attention.block_pairs import FULL, block_kinds, block_pairs
from tests.kernels import test_tree_attention as forests
from tests.kernels.parts import check_cuts
from tests.kernels.test_tree_attention import arrays, random_forest, value_and_grads

BLOCK = 16
ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 75, 4, 2, 8  # five blocks, the last cut short

# a fixture that is the same for every example
SAME = dict(suppress_health_check=[HealthCheck.function_scoped_fixture])


RUN = functools.partial(value_and_grads, implementation='tpu')
PADDED = LENGTH + -LENGTH % BLOCK
STATIC = tpu.Static(
  scale=1.0,
  rows=ROWS,
  kv_heads=KV_HEADS,
  group=HEADS // KV_HEADS,
  dim=DIM,
  block_q=BLOCK,
  block_k=BLOCK,
  key_blocks=PADDED // BLOCK,
)


@functools.partial(jax.jit, static_argnums=(0, 2))
def pairs_of(static, index, split):
  """The kinds of pairs, and the tables by query and by key."""
  kinds = block_kinds(static, index)
  return kinds, block_pairs(kinds, split), block_pairs(kinds.swapaxes(1, 2), split)


@pytest.fixture(autouse=True)
def small(interpreted, monkeypatch):
  """Kernels run as XLA loops on the CPU, in blocks of 16."""
  monkeypatch.setattr(tpu, '_most_tokens', lambda q, k: (BLOCK, BLOCK))


def tensors(rng, dtype=np.float32, queries=LENGTH):
  return arrays(rng, ROWS, queries, LENGTH, HEADS, KV_HEADS, DIM, dtype)


check = functools.partial(forests.check, implementation='tpu')


def document_ends(*lengths):
  """subtree_end [ROWS, LENGTH] of chains, and padding after the last."""
  end = np.zeros((ROWS, LENGTH), np.int32)
  start = 0
  for length in lengths:
    end[:, start : start + length] = start + length
    start += length
  return end


@given(seed=st.integers(0, 2**32 - 1))
@settings(**SAME)
def test_random_trees(seed):
  """Random trees, ragged rows, two query heads on each key head, odd sizes."""
  rng = np.random.default_rng(seed)
  check(tensors(rng), random_forest(rng, ROWS, LENGTH)[1])


@pytest.mark.parametrize('lengths', [(LENGTH,), (16, 32, 16, 3), (1, 73), ()])
def test_documents(lengths):
  """Chains: all of a block seen, edges on blocks, one token alone, nothing at all."""
  check(tensors(np.random.default_rng(0)), document_ends(*lengths))


def test_bfloat16():
  """bf16 inputs accumulate in fp32: the results are near those of exact sums."""
  rng = np.random.default_rng(1)
  end = random_forest(rng, ROWS, LENGTH)[1]
  low = tensors(rng, jnp.bfloat16)
  got = value_and_grads(*low, end, implementation='tpu')
  for a, b in zip(got, forests.by_hand(*low, end), strict=True):
    assert a.dtype == jnp.bfloat16
    assert np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b) < 0.02


@pytest.mark.parametrize(
  'window, sinks', [pytest.param(None, 0, marks=pytest.mark.long), (9, 2)]
)
def test_query_subsets_and_windows(window, sinks):
  """Queries at any indices, some at none; windows and sinks count positions."""
  rng = np.random.default_rng(2)
  _, end, position = random_forest(rng, ROWS, LENGTH)
  index = np.stack([rng.permutation(LENGTH)[:40] for _ in range(ROWS)]).astype(np.int32)
  at = np.take_along_axis(position, index, 1)
  index[:, 3] = -1
  more = dict(q_index=index)
  if window is not None:
    more |= dict(window=window, sinks=sinks, q_position=at, k_position=position)
  out, *_ = check(tensors(rng, queries=40), end, **more)
  assert not np.any(out[:, 3])


def test_empty_rows():
  """A query that sees no key gives exactly 0 and no gradient; huge scores stay
  finite."""
  rng = np.random.default_rng(3)
  q, k, v, weight = tensors(rng)
  end = random_forest(rng, ROWS, LENGTH)[1]
  end[0] = 0
  end[1, :5] = 0  # as in an MTP module: tokens that see nothing before ones that do
  got = jax.device_get(RUN(q * np.float32(1e3), k, v, weight, end))
  for x in got:
    assert np.all(np.isfinite(x))
    assert not np.any(x[0])
    assert not np.any(x[1, :5])
  assert np.any(got[0][1, 5:])


def test_branches_do_not_touch():
  """What cannot be seen has gradient exactly 0, and changing it changes no bit."""
  q, k, v, _ = tensors(np.random.default_rng(4))
  end = document_ends(LENGTH)
  stem, middle = 20, 40  # both inside a block
  end[:, stem:middle] = middle
  weight = np.zeros_like(q)
  weight[:, stem:middle] = 1.0
  got = jax.device_get(RUN(q, k, v, weight, end))
  for x in got[1:]:
    assert not np.any(x[:, middle:])
    assert np.any(x[:, stem:middle])
  for x in (q, k, v):
    x[:, middle:] *= -3.0
  after = jax.device_get(RUN(q, k, v, weight, end))
  for a, b in zip(got, after, strict=True):
    np.testing.assert_array_equal(a[:, :middle], b[:, :middle])


@pytest.mark.parametrize('lengths', [(LENGTH,), (16, 32, 16, 3), ()])
def test_one_key_head(lengths):
  """An odd number of heads: two cores have half of the block pairs each, those of
  padding too."""
  rng = np.random.default_rng(9)
  inputs = arrays(rng, ROWS, LENGTH, LENGTH, 2, 1, DIM)
  check(inputs, document_ends(*lengths))


def test_unseen_blocks_are_not_read():
  """NaN in blocks that nobody asked for reaches nothing: 0 · NaN would."""
  inputs = tensors(np.random.default_rng(5))
  end = document_ends(2 * BLOCK, LENGTH - 2 * BLOCK)
  want = jax.device_get(RUN(*inputs, end))
  for x in inputs:
    x[:, : 2 * BLOCK] = np.nan
  got = jax.device_get(RUN(*inputs, end))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a[:, 2 * BLOCK :], b[:, 2 * BLOCK :])


@given(
  seed=st.integers(0, 2**32 - 1),
  cuts=st.none() | st.lists(st.integers(1, LENGTH), max_size=4),
  window=st.sampled_from([None, 5]),
  split=st.booleans(),
)
@settings(**SAME)
def test_kinds_and_block_pairs(seed, cuts, window, split):
  """Against the mask of every pair, for any integers: nothing seen is lost, a FULL pair
  is full, and the table lists each pair once, sorted, and each block at least once. On
  chains the kinds are exact."""
  rng = np.random.default_rng(seed)
  if cuts is None:
    end = rng.integers(0, PADDED + 1, (ROWS, PADDED))
    index = rng.integers(-1, PADDED, (ROWS, PADDED))
  else:
    window, end = None, np.zeros((ROWS, PADDED), int)
    end[:, :LENGTH] = document_ends(*np.diff([0, *sorted(cuts)]))
    index = np.tile(np.arange(PADDED), (ROWS, 1))
  integers = dict(subtree_end=end, q_index=index)
  if window is not None:
    for name in ('q_position', 'k_position'):
      integers[name] = rng.integers(0, 30, (ROWS, PADDED))
  integers = {name: x.astype(np.int32) for name, x in integers.items()}
  flat = {name: x.reshape(1, -1) for name, x in integers.items()}
  found = pairs_of(STATIC, Visibility(**flat, window=window, sinks=2), split)
  kinds, *tables = jax.device_get(found)
  integers['end'] = integers.pop('subtree_end')
  seen = forests.visible(**integers, window=window, sinks=2)
  m, n = kinds.shape[1:]
  seen = seen.reshape(ROWS, m, BLOCK, n, BLOCK)
  some, every = seen.any((2, 4)), seen.all((2, 4))
  assert np.all(kinds[some] > 0)
  assert np.all(every[kinds == FULL])
  if cuts is not None:
    np.testing.assert_array_equal(kinds, some.astype(int) + every)
  for by, pairs in zip((kinds, kinds.swapaxes(1, 2)), tables, strict=True):
    start, *bounds, count = pairs.parts.tolist()
    entries = pairs.table[:count]
    assert start == 0
    check_cuts(bounds, entries >> 16, split)
    assert pairs.steps == max(np.diff([0, *bounds, count]))
    assert np.all(np.diff(entries) > 0)
    block, partner, kind = entries >> 16, entries >> 2 & (2**14 - 1), entries & 3
    np.testing.assert_array_equal(np.unique(block), np.arange(ROWS * by.shape[1]))
    at = block // by.shape[1], block % by.shape[1], partner % by.shape[2]
    np.testing.assert_array_equal(partner // by.shape[2], at[0])
    np.testing.assert_array_equal(by[at], kind)
    assert np.count_nonzero(kind) == np.count_nonzero(by)


def prepared(end, q, k):
  """Block pairs made before, as for a loop over layers."""
  return jax.jit(lambda end: tpu.prepare(Visibility(end).complete(LENGTH), q, k))(end)


def test_prepared_block_pairs(monkeypatch):
  """They give the same bits and are not made again."""
  rng = np.random.default_rng(6)
  q, k, v, weight = tensors(rng)
  end = random_forest(rng, ROWS, LENGTH)[1]
  want = RUN(q, k, v, weight, end)[0]
  pairs = prepared(end, q, k)
  monkeypatch.setattr(tpu, 'prepare', None)
  attend = functools.partial(tree_attention.attend, implementation='tpu')
  got = jax.jit(attend)(q, k, v, Visibility(end, pairs=pairs))
  np.testing.assert_array_equal(got, want)


def test_more_rows_than_a_table_holds(monkeypatch):
  """Rows are then taken a few at a time, to the same bits, block pairs made before
  among them."""
  rng = np.random.default_rng(6)
  inputs = tensors(rng)
  end = random_forest(rng, ROWS, LENGTH)[1]
  want = RUN(*inputs, end)
  monkeypatch.setattr(tpu, '_MOST_PAIRS', 30)
  assert tpu._rows_together(ROWS, 5, 5) == 1
  assert tpu._rows_together(ROWS, 6, 6) == 0
  # a function of its own: jax's caches do not know what is patched
  run = functools.partial(value_and_grads.__wrapped__, implementation='tpu')
  got = jax.jit(run)(*inputs, end, pairs=prepared(end, *inputs[:2]))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


def simulate(simulated, inputs, end, *, cores=1, **more):
  """Value and gradients on a simulated TPU, and the steps that the kernels took."""
  steps = []

  def record(token, point, core):
    del core
    steps.append(tuple(int(i) for i in point))
    return token

  static = {name: more.pop(name) for name in ('window', 'sinks') if name in more}
  run = functools.partial(value_and_grads.__wrapped__, implementation='tpu', **static)
  parameters = dict(num_cores_or_threads=cores, random_seed=cores)
  with simulated(**parameters, grid_point_recorder=record):
    got = jax.device_get(jax.jit(run)(*inputs, end, **more))
  assert steps
  return got, steps


def assert_near(got, want, tolerance):
  for a, b in zip(got, want, strict=True):
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(np.float64(a), b, atol=tolerance * scale, rtol=0)


@pytest.mark.long
def test_simulated(simulated):
  """No race, no bad read; the steps of a kernel are the block pairs that are seen."""
  rng = np.random.default_rng(7)
  length = 2 * BLOCK + 3
  inputs = arrays(rng, 1, length, length, HEADS, KV_HEADS, DIM)
  end = np.full((1, length), length, np.int32)
  end[:, :BLOCK] = BLOCK  # the second document fills a block and a piece
  got, steps = simulate(simulated, inputs, end)
  assert_near(got, forests.by_hand(*inputs, end), 1e-5)
  # query blocks 0, 1, 2 see 1, 1, 2 key blocks; key blocks are seen by 1, 2, 1
  pairs = [(head, pair) for head in range(KV_HEADS) for pair in range(4)]
  assert sorted(steps) == sorted(3 * pairs)


@pytest.mark.long
@pytest.mark.parametrize(
  'cores, dtype, queries, windowed',
  [  # every pair of choices
    (1, np.float32, LENGTH, False),
    (1, jnp.bfloat16, 40, True),
    (2, np.float32, 40, True),
    (2, jnp.bfloat16, LENGTH, True),
    (2, jnp.bfloat16, 40, False),
  ],
)
def test_simulated_grid(simulated, cores, dtype, queries, windowed):
  """The same for everything that changes what a kernel reads, and on two cores."""
  rng = np.random.default_rng(8)
  _, end, position = random_forest(rng, ROWS, LENGTH)
  end[1, : BLOCK + 3] = 0
  inputs = tensors(rng, dtype, queries)
  more = {}
  if queries < LENGTH:  # a chunk of a longer row, with a hole
    more |= dict(
      q_index=np.tile(np.arange(30, 30 + queries, dtype=np.int32), (ROWS, 1))
    )
    more['q_index'][:, 7] = -1
  if windowed:
    at = position if queries == LENGTH else position[:, 30 : 30 + queries]
    more |= dict(window=9, sinks=2, q_position=at, k_position=position)
  got, _ = simulate(simulated, inputs, end, cores=cores, **more)
  assert all(x.dtype == dtype for x in got)
  tolerance = 1e-5 if dtype == np.float32 else 0.05
  assert_near(got, forests.by_hand(*inputs, end, **more), tolerance)


@pytest.mark.long
@pytest.mark.parametrize('rows', [1, ROWS])
def test_simulated_halves(simulated, rows):
  """Cores that share a head write no block of each other's, also where one of them has
  fewer pairs; neither has more than all but one block."""
  rng = np.random.default_rng(10)
  inputs = arrays(rng, rows, LENGTH, LENGTH, 2, 1, DIM)
  end = document_ends(LENGTH)[:rows]
  got, steps = simulate(simulated, inputs, end, cores=2)
  assert_near(got, forests.by_hand(*inputs, end), 1e-5)
  # blocks of a row see 1 … 5: halves of 6 and 9, or whole rows
  most = 9 if rows == 1 else 15
  assert sorted(steps) == sorted(3 * [(i, t) for i in range(2) for t in range(most)])


@pytest.mark.long
@given(data=st.data())
@settings(**SAME)
def test_equals_reference_at_any_shape(data):
  """One token to a few blocks, heads alone or in groups, more keys than queries."""
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  rows, kv_heads, group = (data.draw(st.integers(1, 3)) for _ in range(3))
  length = data.draw(st.integers(1, 3 * BLOCK + 1))
  queries = data.draw(st.integers(1, length))
  end = random_forest(rng, rows, length)[1]
  index = rng.integers(0, length, (rows, queries)).astype(np.int32)
  inputs = arrays(rng, rows, queries, length, kv_heads * group, kv_heads, DIM)
  check(inputs, end, q_index=index)


def traced(dtype):
  """For all platforms, at sizes of real blocks."""
  q = jax.ShapeDtypeStruct((1, 300, 4, 64), dtype)
  kv = jax.ShapeDtypeStruct((1, 300, 2, 64), dtype)
  end = jax.ShapeDtypeStruct((1, 300), jnp.int32)
  run = functools.partial(value_and_grads.__wrapped__, implementation=None)
  with platforms.any_platform(), pltpu.force_tpu_interpret_mode(None):
    return jax.jit(run).trace(q, kv, kv, q, end)


@pytest.mark.parametrize(
  'dtype, x64, kernels',
  [
    pytest.param(jnp.bfloat16, False, 3, marks=pytest.mark.long),
    (jnp.float32, True, 3),
    (jnp.float64, True, 0),
  ],
)
def test_default_is_the_platforms(monkeypatch, dtype, x64, kernels):
  """Without a name the kernels are lowered for a TPU, on a machine that has none, and
  only there; under x64 too, where a dtype that TPUs lack takes the reference."""
  monkeypatch.undo()
  with jax.enable_x64(x64):
    program = traced(dtype)
    text = program.lower(lowering_platforms=('tpu',)).as_text()
    assert text.count('tpu_custom_call') == kernels
    if kernels:
      text = program.lower(lowering_platforms=('cpu',)).as_text()
      assert 'custom_call' not in text


def test_unsupported():
  """The error names what the kernel does not support, and what to do."""
  q = jnp.zeros((1, 4, 2, 4), jnp.float16)
  end = jnp.full((1, 4), 4)
  with pytest.raises(ValueError, match='float16.*must all be bfloat16'):
    tree_attention.attend(q, q, q, Visibility(end), implementation='tpu')
  long = jax.ShapeDtypeStruct((1, 2**18, 1, 4), jnp.float32)
  with pytest.raises(ValueError, match='scalar memory.*q_index'):
    jax.eval_shape(
      functools.partial(tree_attention.attend, implementation='tpu'),
      *[long] * 3,
      Visibility(jax.ShapeDtypeStruct((1, 2**18), jnp.int32)),
    )
