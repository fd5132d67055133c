"""The engine's pure functions against full forward passes without a cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import model
from m2jax.kernels.paged_attention import cpu as paged_attention
from m2jax.layers import head
from m2jax.rollout.engine import decode_state, forward
from m2jax.rollout.engine import pages as pages_lib
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving import plan
from tests.rollout.conftest import CFG, CONTEXT, ENGINE_CONFIG, init, log_softmax

THREE = np.array([3], np.int32)


def prompt(seed: int, size: int) -> list[int]:
  return np.random.default_rng(seed).integers(CFG.vocab_size, size=size).tolist()


@pytest.mark.parametrize(
  'unroll, chunk, long',
  [
    (False, 5, 5),
    *(
      pytest.param(*case, marks=pytest.mark.long)
      for case in [(False, 5, 512), (True, 1, 512), (True, 5, 5)]
    ),
  ],
)
def test_cached_logits_equal_a_full_pass(unroll, chunk, long, monkeypatch):
  """Tokens see what was stored and each other, at any split, from any pages; long
  chunks by tree attention."""
  monkeypatch.setattr(paged_attention, 'LONG_CHUNK', long)
  cfg = dataclasses.replace(CFG, num_layers=2, unroll_layers=unroll)
  variables = init(0, cfg)
  sequences = np.random.default_rng(0).integers(CFG.vocab_size, size=(3, 31))
  want = np.asarray(jax.jit(model.M2(cfg).apply)(variables, sequences))
  # Pages hold garbage beyond the lengths, and are in no order.
  tables = np.random.default_rng(1).permutation(29)[:27].reshape(3, 9) + 1
  garbage = jax.tree.map(lambda x: np.full_like(x, 7), pages_lib.empty(cfg, 30, 4))

  @jax.jit
  def extend(cache, begin, counts):
    tokens = jnp.asarray(sequences)[jnp.arange(3)[:, None], begin[:, None] + at]
    rows = forward.Rows(tokens, begin, counts, jnp.asarray(tables))
    hidden, cache = forward.extend(cfg, variables, cache, rows)
    return head.logits(variables['params'], hidden), cache

  at, every = np.arange(chunk), np.full(3, chunk)
  for seed in range(10):
    lengths = np.random.default_rng(seed).integers(0, 21, size=3)
    lengths[seed % 3] = (0, 20)[seed % 2]  # the ends, always
    cache = garbage
    for begin in range(0, 20, chunk):
      counts = np.clip(lengths - begin, 0, chunk)
      _, cache = extend(cache, np.full(3, begin), counts)
    for begin in range(0, 10, chunk):
      got, cache = extend(cache, lengths + begin, every)
      got = np.asarray(got)
      for row, n in enumerate(lengths + begin):
        np.testing.assert_allclose(got[row], want[row, n : n + chunk], atol=2e-4)


def test_jetstream_calls_decode_greedily(engine, variables, reference):
  """Any JetStream driver must get the tokens that a full pass would give."""
  state = engine.init_decode_state()
  prompts = {1: prompt(1, 11), 3: prompt(2, 7), 0: prompt(3, 30)}
  for slot, tokens in prompts.items():
    padded = np.zeros(32, np.int32)
    padded[: len(tokens)] = tokens
    prefix = engine.prefill(variables, padded_tokens=padded, true_length=len(tokens))
    slots = decode_state.make_slots(1, ENGINE_CONFIG)
    slots.temperature[:] = 0
    state = engine.insert(prefix, state, slot, slots=slots)
    jax.tree.map(lambda x: x.delete(), prefix)  # as JetStream's driver does
  out = {slot: [] for slot in prompts}
  for step in range(1, 7):
    state, result = engine.generate(variables, state)
    result.copy_to_host_async()
    result = result.convert_to_numpy()
    assert result.get_result_at_slot(2).valid[0, 0] == 0  # nobody there
    for slot, tokens in out.items():
      data = result.get_result_at_slot(slot)
      assert (data.valid[0, 0], data.lengths[0]) == (1, step)
      tokens.append(int(data.tokens[0, 0]))
      logits = reference.logits(variables, prompts[slot] + tokens[:-1])[-1]
      want = log_softmax(logits)[tokens[-1]]
      np.testing.assert_allclose(data.log_prob[0, 0], want, atol=1e-4)
  for slot, tokens in out.items():
    assert tokens == reference.greedy(variables, prompts[slot], 6)


def test_prefill_continues_an_existing_prefix(engine, variables, reference):
  """JetStream's existing_prefix, up to the end of the context and padded beyond it."""
  tokens = prompt(4, CONTEXT - 3)
  prefix = None
  for begin, end in ((0, 9), (9, 20), (20, CONTEXT - 3)):
    padded = np.zeros(32, np.int32)
    padded[: end - begin] = tokens[begin:end]
    prefix = engine.prefill(
      variables,
      existing_prefix=prefix,
      padded_tokens=padded,
      true_length=end - begin,
    )
  slots = decode_state.make_slots(1, ENGINE_CONFIG)
  slots.temperature[:] = 0
  state = engine.insert(prefix, engine.init_decode_state(), 2, slots=slots)
  out = []
  for _ in range(5):
    state, result = engine.generate(variables, state)
    data = np.asarray(result.data)
    if data[2, 1]:
      out.append(int(data[2, 0]))
  assert out == reference.greedy(variables, tokens, 3)  # and the context is full


def test_generate_many_ends_rows_and_then_itself(engine, variables, reference):
  """Stop ids, max_tokens and the early end are decided on the device, exactly."""
  tokens = prompt(5, 6)
  greedy = reference.greedy(variables, tokens, 4)
  state = engine.init_decode_state()
  rows = np.array([2, 1, 3, 0], np.int32)
  tables = np.arange(1, 49, dtype=np.int32).reshape(4, 12)
  chunk = np.tile(np.array(tokens + [0, 0], np.int32), (4, 1))
  counts = np.array([5, 5, 5, 0], np.int32)
  state = engine.prefill_rows(
    variables, state, chunk, np.zeros(4, np.int32), counts, tables
  )
  slots = decode_state.make_slots(4, ENGINE_CONFIG)
  slots.length[:], slots.token[:], slots.temperature[:] = 5, tokens[-1], 0
  slots.remaining[:3] = 10, 2, 10
  slots.stop_ids[0, 1] = greedy[2]
  slots.stop_ids[2, 0] = greedy[0]
  state = engine.admit(state, rows, THREE, slots)
  state, sampled = engine.generate_many(
    variables, state, rows, THREE, tables, np.int32(4)
  )
  sampled, slots = jax.device_get((sampled, state.slots))
  stop_at = greedy.index(greedy[2]) + 1
  ends = [decode_state.STOP, decode_state.LENGTH, decode_state.STOP]
  assert sampled.counts.tolist() == [stop_at, 2, 1, 0]
  assert sampled.finish_code.tolist()[:3] == ends
  assert sampled.tokens[0, :stop_at].tolist() == greedy[:stop_at]
  assert slots.length[rows[:3]].tolist() == [5 + stop_at, 7, 6]
  assert slots.remaining[rows].tolist() == [0, 0, 0, 0]
  _, sampled = engine.generate_many(variables, state, rows, THREE, tables, np.int32(4))
  assert sampled.counts.tolist() == [0, 0, 0, 0]


def test_a_run_of_near_certain_tokens_ends_the_response(engine, variables):
  """Degenerate repetition must not fill contexts (the report's 3,000-token rule)."""
  params = dict(variables['params'])
  params['head'] = np.asarray(params['head']) * np.float32(
    1e5
  )  # every choice is certain
  sharp = {**variables, 'params': params}
  slots = decode_state.make_slots(4, ENGINE_CONFIG)
  slots.token[:2], slots.remaining[:2] = 1, 40
  slots.temperature[1] = 1e9  # near uniform: never confident
  rows, two = np.arange(4, dtype=np.int32), np.array([2], np.int32)
  tables = np.arange(1, 49, dtype=np.int32).reshape(4, 12)
  state = engine.admit(engine.init_decode_state(), rows, two, slots)
  counts, ended = 0, 0
  for _ in range(9):
    state, sampled = engine.generate_many(sharp, state, rows, two, tables, np.int32(4))
    sampled = jax.device_get(sampled)
    counts, ended = (
      counts + sampled.counts[:2],
      np.maximum(ended, sampled.finish_code[:2]),
    )
  assert counts.tolist() == [ENGINE_CONFIG.confident_tokens, 36]
  assert ended.tolist() == [decode_state.LENGTH, decode_state.RUNNING]


def test_rows_of_padding_touch_nothing(engine, variables):
  """Warm-up and padding rows run together with live slots."""
  state = engine.init_decode_state()
  pages = jax.tree.map(
    lambda x: jax.device_put(np.asarray(x) + x.dtype.type(3), x.sharding), state.pages
  )
  state = dataclasses.replace(state, pages=pages)
  before = jax.device_get(state)
  after = jax.device_get(engine.warmup(variables, state))
  jax.tree.map(np.testing.assert_array_equal, before.slots, after.slots)
  for name, axis in (('k', 2), ('v', 2), ('tokens', 0)):
    used = [
      np.delete(getattr(x.pages, name), pages_lib.UNUSED, axis) for x in (before, after)
    ]
    np.testing.assert_array_equal(*used)


def test_state_is_donated(engine, variables):
  """At M2's size two caches do not fit."""
  state = engine.init_decode_state()
  rows, none = np.zeros(4, np.int32), np.zeros(1, np.int32)
  tables = np.zeros((4, 12), np.int32)
  engine.generate_many(variables, state, rows, none, tables, none[0])
  assert all(x.is_deleted() for x in jax.tree.leaves(state.pages))


def test_no_program_copies_the_cache(engine, variables):
  """At M2's size a copy of the pages, even of one layer's, would be most of a step."""
  config = ENGINE_CONFIG
  cfg = dataclasses.replace(CFG, unroll_layers=False)
  many = Engine(cfg, dataclasses.replace(config, pages=5000))
  state = jax.eval_shape(many.init_decode_state)
  rows, one = np.zeros(4, np.int32), np.zeros(1, np.int32)
  tables = np.zeros((4, 12), np.int32)
  lowered = [
    many.generate_many.lower(variables, state, rows, one, tables, one[0]),
    many.prefill_rows.lower(
      variables, state, np.zeros((4, 8), np.int32), rows, rows, tables
    ),
  ]
  layer_bytes = 5000 * 4 * CFG.num_kv_heads * CFG.head_dim * 4
  for program in lowered:
    assert program.compile().memory_analysis().temp_size_in_bytes < layer_bytes / 2


@pytest.mark.parametrize(
  'field, value',
  [
    ('slots', 0),
    ('context_tokens', 1),
    ('decode_rows', (2, 8)),
    ('page_tokens', 0),
    ('pages', 12),
    ('contexts', (16,)),
    ('prefill_shapes', ((1, 100),)),
    ('confident_probability', 1.0),
  ],
)
def test_bad_sizes_are_named(field, value):
  """A wrong bucket must fail at once, not as a shape error in the middle of a run."""
  with pytest.raises(ValueError, match=f'EngineConfig.{field}='):
    dataclasses.replace(ENGINE_CONFIG, **{field: value})


def test_context_longer_than_the_model_is_refused():
  """RoPE would extrapolate in silence."""
  with pytest.raises(ValueError, match='context_tokens=65 exceeds.*max_positions=64'):
    Engine(CFG, EngineConfig(slots=2, context_tokens=65))


@given(
  st.lists(st.tuples(st.integers(1, 48), st.integers(0, 2)), min_size=1, max_size=96)
)
def test_decode_calls_share_out_the_slots(sequences):
  """Each slot is in one call, with room for it; together they cost no more than the one
  call that would do, and than any cut in two."""
  rows, sizes = (8, 32, 96), (12, 24, 48)
  pages, group = np.array(sequences).T

  def cost(size, n):
    return (size + plan.CALL_ROWS) * (n + plan.ROW_PAGES)

  def fit(sizes, value):
    return next(size for size in sizes if size >= value)

  def most(which):
    return np.bincount(group[which]).max()

  calls = plan.decode(pages, group, rows, sizes)
  together = np.concatenate([which for which, *_ in calls])
  assert sorted(together.tolist()) == list(range(len(pages)))
  for which, size, n in calls:
    assert size == fit(rows, most(which)) and n == fit(sizes, pages[which].max())
  total = sum(cost(size, n) for _, size, n in calls)
  for cut in (0, *sizes):
    parts = [np.flatnonzero(pages <= cut), np.flatnonzero(pages > cut)]
    assert total <= sum(
      cost(fit(rows, most(p)), fit(sizes, pages[p].max())) for p in parts if p.size
    )


@given(
  st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), min_size=1, max_size=40),
  st.integers(1, 64),
  st.integers(2, 384),
)
def test_a_prefill_call_serves_the_oldest_within_its_shape(prompts, slots, context):
  """The oldest prompt of a group always moves on: later ones cannot starve it."""
  config = EngineConfig(slots=slots, context_tokens=context)
  remaining, group = np.array(prompts).T
  which, rows, chunk = plan.prefill(remaining, group, config.prefill_shapes)
  assert (rows, chunk) in config.prefill_shapes
  assert len(set(which.tolist())) == len(which)
  for g in np.unique(group):
    assert np.flatnonzero(group == g)[0] in which
    assert np.sum(group[which] == g) <= rows


def test_sizes_are_of_all_groups_together():
  """A config means the same on any mesh: each group has its part, and never less than
  one sequence."""
  whole = EngineConfig(
    slots=10, context_tokens=64, pages=1 + 21, prefill_shapes=((3, 8),)
  )
  part = whole.of_group(4)
  assert part.slots == 3 and part.prefill_shapes == ((1, 8),) and part.pages == 1 + 6
  assert part.decode_rows == (1, 3) and part.contexts == whole.contexts
  assert whole.of_group(100).pages == 1 + whole.context_pages
  assert whole.of_group(1) == whole
