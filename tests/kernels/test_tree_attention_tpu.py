"""The TPU kernel of forest attention, interpreted on the CPU with small blocks: values
and gradients against the reference, its block pairs, and what it lowers to (law 7)."""

from __future__ import annotations

import dataclasses
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
from m2jax.kernels.tree_attention import Visibility, reference, tpu
from m2jax.kernels.tree_attention.block_pairs import FULL, block_kinds, block_pairs
from tests.kernels.parts import check_cuts
from tests.kernels.test_tree_attention import arrays, random_forest, value_and_grads

BLOCK = 16
ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 75, 4, 2, 8  # five blocks, the last cut short

# a fixture that is the same for every example
SAME = dict(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """Kernels run as XLA loops on the CPU, in blocks of 16."""
  call = functools.partial(tpu.pl.pallas_call, interpret=True)
  monkeypatch.setattr(tpu.pl, 'pallas_call', call)
  monkeypatch.setattr(tpu, '_most_tokens', lambda q, k: (BLOCK, BLOCK))


def tensors(rng, dtype=np.float32, queries=LENGTH):
  return arrays(rng, ROWS, queries, LENGTH, HEADS, KV_HEADS, DIM, dtype)


def unmemoised():
  """`value_and_grads` traced anew: memory does not know what a test has patched."""
  jax.clear_caches()
  names = ('implementation', 'window', 'sinks')
  return jax.jit(value_and_grads.__wrapped__, static_argnames=names)


def assert_same(inputs, end, *, atol=3e-6, **more):
  """The kernel agrees with the reference on the output and on every gradient."""
  got = value_and_grads(*inputs, end, implementation='tpu', **more)
  want = value_and_grads(*inputs, end, implementation='reference', **more)
  for name, a, b in zip(('out', 'd_q', 'd_k', 'd_v'), got, want, strict=True):
    assert a.dtype == b.dtype, name
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(a, b, atol=atol * scale, rtol=0, err_msg=name)


def document_ends(*lengths):
  """subtree_end [ROWS, LENGTH] of chains, and padding after the last."""
  end = np.zeros((ROWS, LENGTH), np.int32)
  start = 0
  for length in lengths:
    end[:, start : start + length] = start + length
    start += length
  return end


def index_of(end, **more):
  """The kernel's view of integers [ROWS, …], padded to blocks."""

  def padded(x, padding):
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), constant_values=padding)
    return jnp.array(x.reshape(1, -1), jnp.int32)

  index = Visibility(end, sinks=2, **more).complete(LENGTH).map(padded, padded)
  static = tpu.Static(
    scale=1.0,
    rows=ROWS,
    kv_heads=KV_HEADS,
    group=HEADS // KV_HEADS,
    dim=DIM,
    block_q=BLOCK,
    block_k=BLOCK,
    key_blocks=-(-LENGTH // BLOCK),
  )
  return static, index


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, **SAME)
def test_equals_reference(seed):
  """Random trees, ragged rows, two query heads on each key head, odd sizes."""
  rng = np.random.default_rng(seed)
  assert_same(tensors(rng), random_forest(rng, ROWS, LENGTH)[1])


@pytest.mark.parametrize('lengths', [(LENGTH,), (16, 32, 16, 3), (1, 73), ()])
def test_documents(lengths):
  """Chains: all of a block seen, edges on blocks, one token alone, nothing at all."""
  assert_same(tensors(np.random.default_rng(0)), document_ends(*lengths))


def test_bfloat16():
  """bf16 inputs accumulate in fp32: near the result of fp32 inputs."""
  rng = np.random.default_rng(1)
  end = random_forest(rng, ROWS, LENGTH)[1]
  low = tensors(rng, jnp.bfloat16)
  exact = (x.astype(jnp.float32) for x in low)
  got = value_and_grads(*low, end, implementation='tpu')
  want = value_and_grads(*exact, end, implementation='reference')
  for a, b in zip(got, want, strict=True):
    assert a.dtype == jnp.bfloat16
    assert np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b) < 0.02


@pytest.mark.parametrize('window, sinks', [(None, 0), (9, 2)])
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
  inputs = tensors(rng, queries=40)
  assert_same(inputs, end, **more)
  assert not np.any(
    value_and_grads(*inputs, end, implementation='tpu', **more)[0][:, 3]
  )


def test_empty_rows():
  """A query that sees no key gives exactly 0 and no gradient; huge scores stay
  finite."""
  rng = np.random.default_rng(3)
  q, k, v, weight = tensors(rng)
  end = random_forest(rng, ROWS, LENGTH)[1]
  end[0] = 0
  end[1, :5] = 0  # as in an MTP module: tokens that see nothing before ones that do
  got = value_and_grads(q * 1e3, k, v, weight, end, implementation='tpu')
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
  weight = jnp.zeros_like(q).at[:, stem:middle].set(1.0)
  got = value_and_grads(q, k, v, weight, end, implementation='tpu')
  for x in got[1:]:
    assert not np.any(x[:, middle:])
    assert np.any(x[:, stem:middle])
  moved = [x.at[:, middle:].multiply(-3.0) for x in (q, k, v)]
  after = value_and_grads(*moved, weight, end, implementation='tpu')
  for a, b in zip(got, after, strict=True):
    np.testing.assert_array_equal(a[:, :middle], b[:, :middle])


@pytest.mark.parametrize('lengths', [(LENGTH,), (16, 32, 16, 3), ()])
def test_one_key_head(lengths):
  """An odd number of heads: two cores have half of the block pairs each, those of
  padding too."""
  rng = np.random.default_rng(9)
  inputs = arrays(rng, ROWS, LENGTH, LENGTH, 2, 1, DIM)
  assert_same(inputs, document_ends(*lengths))


def test_unseen_blocks_are_not_read():
  """NaN in blocks that nobody asked for reaches nothing: 0 · NaN would."""
  inputs = tensors(np.random.default_rng(5))
  end = document_ends(2 * BLOCK, LENGTH - 2 * BLOCK)
  want = value_and_grads(*inputs, end, implementation='tpu')
  dirty = [x.at[:, : 2 * BLOCK].set(jnp.nan) for x in inputs]
  got = value_and_grads(*dirty, end, implementation='tpu')
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a[:, 2 * BLOCK :], b[:, 2 * BLOCK :])


@given(data=st.data())
@settings(max_examples=12, **SAME)
def test_kinds_and_block_pairs(data):
  """Against the mask of every pair, for any integers: nothing seen is lost, a FULL pair
  is full, and the table lists each pair once, sorted, and each block at least once. On
  chains the kinds are exact."""
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  more = {}
  if data.draw(st.booleans()):
    cuts = sorted(data.draw(st.lists(st.integers(1, LENGTH), max_size=4)))
    end = document_ends(*np.diff([0, *cuts]))
    exact = True
  else:
    end = rng.integers(0, LENGTH + 1, (ROWS, LENGTH)).astype(np.int32)
    exact = False
    if data.draw(st.booleans()):
      more |= dict(q_index=rng.integers(-1, LENGTH, (ROWS, 40)))
    if data.draw(st.booleans()):
      queries = more['q_index'].shape[1] if more else LENGTH
      positions = [rng.integers(0, 30, (ROWS, n)) for n in (queries, LENGTH)]
      more |= dict(window=5, q_position=positions[0], k_position=positions[1])
  static, index = index_of(end, **more)
  kinds = np.asarray(block_kinds(static, index))
  seen = reference.visible(jax.tree.map(lambda x: x.reshape(ROWS, -1), index))
  m, n = kinds.shape[1:]
  seen = np.asarray(seen).reshape(ROWS, m, BLOCK, n, BLOCK)
  some, every = seen.any((2, 4)), seen.all((2, 4))
  assert np.all(kinds[some] > 0)
  assert np.all(every[kinds == FULL])
  if exact:
    np.testing.assert_array_equal(kinds, some.astype(int) + every)
  for by in (kinds, kinds.swapaxes(1, 2)):
    split = data.draw(st.booleans())
    pairs = block_pairs(jnp.array(by), split)
    start, *cuts, count = np.asarray(pairs.parts).tolist()
    entries = np.asarray(pairs.table)[:count]
    assert start == 0
    check_cuts(cuts, entries >> 16, split)
    assert pairs.steps == max(np.diff([0, *cuts, count]))
    assert np.all(np.diff(entries) > 0)
    block, partner, kind = entries >> 16, entries >> 2 & (2**14 - 1), entries & 3
    np.testing.assert_array_equal(np.unique(block), np.arange(ROWS * by.shape[1]))
    at = block // by.shape[1], block % by.shape[1], partner % by.shape[2]
    np.testing.assert_array_equal(partner // by.shape[2], at[0])
    np.testing.assert_array_equal(by[at], kind)
    assert np.count_nonzero(kind) == np.count_nonzero(by)


def test_more_rows_than_a_table_holds(monkeypatch):
  """Rows are then taken a few at a time, to the same bits."""
  inputs = tensors(np.random.default_rng(6))
  end = random_forest(np.random.default_rng(6), ROWS, LENGTH)[1]
  want = value_and_grads(*inputs, end, implementation='tpu')
  monkeypatch.setattr(tpu, '_MOST_PAIRS', 30)
  assert tpu._rows_together(ROWS, 5, 5) == 1
  assert tpu._rows_together(ROWS, 6, 6) == 0
  got = unmemoised()(*inputs, end, implementation='tpu')
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('most_pairs', [tpu._MOST_PAIRS, 30])
def test_prepared_block_pairs(monkeypatch, most_pairs):
  """Made before, as for a loop over layers, block pairs give the same bits and are not
  made again; also where rows are taken a few at a time."""
  monkeypatch.setattr(tpu, '_MOST_PAIRS', most_pairs)
  rng = np.random.default_rng(6)
  q, k, v, _ = tensors(rng)
  end = jnp.array(random_forest(rng, ROWS, LENGTH)[1])
  seen = Visibility(end).complete(LENGTH)
  want = tree_attention.attend(q, k, v, seen, implementation='tpu')
  seen = dataclasses.replace(seen, pairs=tpu.prepare(seen, q, k))
  monkeypatch.setattr(tpu, 'prepare', None)
  got = tree_attention.attend(q, k, v, seen, implementation='tpu')
  np.testing.assert_array_equal(got, want)


def simulate(monkeypatch, inputs, end, *, cores=1, **more):
  """Value and gradients on a simulated TPU on which a race, a read of what was never
  written, or one out of bounds is an error; and the steps that the kernels took."""
  steps = []

  def record(token, point, core):
    del core
    steps.append(tuple(int(i) for i in point))
    return token

  params = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory='nan',
    out_of_bounds_reads='raise',
    num_cores_or_threads=cores,
    random_seed=cores,
    grid_point_recorder=record,
  )
  try:
    with monkeypatch.context() as patch:
      call = functools.partial(tpu.pl.pallas_call.func, interpret=params)
      patch.setattr(tpu.pl, 'pallas_call', call)
      got = unmemoised()(*inputs, end, implementation='tpu', **more)
      jax.block_until_ready(got)
  finally:
    pltpu.reset_tpu_interpret_mode_state()
    jax.clear_caches()
  assert steps
  return got, steps


def test_simulated(monkeypatch):
  """No race, no bad read; the steps of a kernel are the block pairs that are seen."""
  rng = np.random.default_rng(7)
  length = 2 * BLOCK + 3
  inputs = arrays(rng, 1, length, length, HEADS, KV_HEADS, DIM)
  end = np.full((1, length), length, np.int32)
  end[:, :BLOCK] = BLOCK  # the second document fills a block and a piece
  got, steps = simulate(monkeypatch, inputs, end)
  want = value_and_grads(*inputs, end, implementation='reference')
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  # query blocks 0, 1, 2 see 1, 1, 2 key blocks; key blocks are seen by 1, 2, 1
  pairs = [(head, pair) for head in range(KV_HEADS) for pair in range(4)]
  assert sorted(steps) == sorted(3 * pairs)


@pytest.mark.long
@pytest.mark.parametrize('cores', [1, 2])
@pytest.mark.parametrize('dtype, tolerance', [(np.float32, 1e-5), (jnp.bfloat16, 0.05)])
@pytest.mark.parametrize('queries', [LENGTH, 40])
@pytest.mark.parametrize('windowed', [False, True])
def test_simulated_grid(monkeypatch, cores, dtype, tolerance, queries, windowed):
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
  got, _ = simulate(monkeypatch, inputs, end, cores=cores, **more)
  exact = (x.astype(jnp.float32) for x in inputs)
  want = value_and_grads(*exact, end, implementation='reference', **more)
  for a, b in zip(got, want, strict=True):
    assert a.dtype == dtype
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(np.float32(a), b, atol=tolerance * scale, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize('rows', [1, ROWS])
def test_simulated_halves(monkeypatch, rows):
  """Cores that share a head write no block of each other's, also where one of them has
  fewer pairs; neither has more than all but one block."""
  rng = np.random.default_rng(10)
  inputs = arrays(rng, rows, LENGTH, LENGTH, 2, 1, DIM)
  end = document_ends(LENGTH)[:rows]
  got, steps = simulate(monkeypatch, inputs, end, cores=2)
  want = value_and_grads(*inputs, end, implementation='reference')
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  # blocks of a row see 1 … 5: halves of 6 and 9, or whole rows
  most = 9 if rows == 1 else 15
  assert sorted(steps) == sorted(3 * [(i, t) for i in range(2) for t in range(most)])


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=25, **SAME)
def test_equals_reference_at_any_shape(data):
  """One token to a few blocks, heads alone or in groups, more keys than queries."""
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  rows, kv_heads, group = (data.draw(st.integers(1, 3)) for _ in range(3))
  length = data.draw(st.integers(1, 3 * BLOCK + 1))
  queries = data.draw(st.integers(1, length))
  end = random_forest(rng, rows, length)[1]
  index = rng.integers(0, length, (rows, queries)).astype(np.int32)
  inputs = arrays(rng, rows, queries, length, kv_heads * group, kv_heads, DIM)
  assert_same(inputs, end, q_index=index)


def lowered(platform, dtype=jnp.bfloat16, **more):
  q = jax.ShapeDtypeStruct((1, 300, 4, 64), dtype)
  kv = jax.ShapeDtypeStruct((1, 300, 2, 64), dtype)
  end = jax.ShapeDtypeStruct((1, 300), jnp.int32)
  grads = unmemoised()
  with platforms.any_platform():
    traced = grads.trace(q, kv, kv, q, end, implementation=None, **more)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_default_is_the_platforms(monkeypatch):
  """Without a name the kernels are lowered for a TPU, on a machine that has none, and
  only there; under x64 too, where a dtype that TPUs lack takes the reference."""
  monkeypatch.undo()
  assert lowered('tpu').count('tpu_custom_call') == 3
  assert 'custom_call' not in lowered('cpu')
  with jax.enable_x64():
    assert lowered('tpu', jnp.float32).count('tpu_custom_call') == 3
    assert 'tpu_custom_call' not in lowered('tpu', jnp.float64)


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
