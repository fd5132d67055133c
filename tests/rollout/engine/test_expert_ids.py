"""Recorded expert ids are those that a full forward pass uses (law 4)."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from m2jax import forest, model
from m2jax.rollout.engine import decode_state
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.jetstream.calls import EngineApi
from tests.rollout.conftest import CFG, CONTEXT, ENGINE_CONFIG, RECORDING
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import request, run


@pytest.fixture(scope='module')
def full():
  """full(variables, tokens) → [n, L, k] ids of a pass without a cache."""
  forward = jax.jit(model.forward, static_argnums=0)

  def ids(variables, tokens):
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    out = forward(CFG, variables, forest.causal(padded))
    return np.asarray(out.experts)[0, : len(tokens)]

  return ids


def check(full, variables, tokens, result):
  """All but the last token, which was never fed back, have the pass's ids."""
  sequence = [*tokens, *result.tokens]
  assert result.experts.dtype == np.int16
  assert result.experts.shape == (len(sequence), CFG.num_layers, CFG.experts_per_token)
  np.testing.assert_array_equal(result.experts[-1], -1)
  want = full(variables, sequence)[:-1]
  np.testing.assert_array_equal(np.sort(result.experts[:-1]), np.sort(want))


def test_hits_copies_and_chunks(serve, recording, variables, full):
  """Ids are complete however the K/V came to be in the slot: prefilled in chunks, up
  to the context's end, copied from a neighbour, or left there by the turn before."""
  scheduler = serve(recording)
  shared = prompt(7, 12)
  group = run(scheduler, *(request(shared, max_tokens=5) for _ in range(4)))
  assert scheduler.stats()['prefix_hit_tokens'] == 3 * 8
  for result in group:
    check(full, variables, shared, result)
  turns = [shared + list(r.tokens) + prompt(8 + i, 3) for i, r in enumerate(group)]
  before = scheduler.stats()['prefix_hit_tokens']
  for tokens, result in zip(
    turns, run(scheduler, *(request(t, max_tokens=4) for t in turns)), strict=True
  ):
    check(full, variables, tokens, result)
  assert scheduler.stats()['prefix_hit_tokens'] > before
  long = [prompt(i, n) for i, n in ((1, 1), (2, 33), (3, CONTEXT - 2))]
  for tokens, result in zip(long, run(scheduler, *map(request, long)), strict=True):
    check(full, variables, tokens, result)


def test_a_hit_has_the_ids_of_its_keys(serve, recording, variables, full):
  """After a swap of weights a prefix in the cache was routed by the old ones, and
  sampling went on from that: its record says so, not what the new ones would do."""
  router = {'layers': variables['router']['layers'] + np.linspace(0, 9, 4)}
  biased = {**variables, 'router': router}
  scheduler = serve(recording, reuse_stale_prefix=True)
  tokens = prompt(7, 13)
  run(scheduler, request(tokens, max_tokens=1))
  scheduler.update_weights(biased, 1)
  result = run(scheduler, request(tokens, max_tokens=3))
  assert scheduler.stats()['prefix_hit_tokens'] == 12
  old, new = (np.sort(full(v, tokens)) for v in (variables, biased))
  np.testing.assert_array_equal(np.sort(result.experts[:12]), old[:12])
  assert (old[:12] != new[:12]).any()
  # K/V of old weights or not, this bias leaves experts 2 and 3
  np.testing.assert_array_equal(np.sort(result.experts[12:15])[..., 0], 2)


@pytest.mark.parametrize('unroll', [True, pytest.param(False, marks=pytest.mark.long)])
def test_jetstream_prefixes(recording, variables, full, unroll):
  """A Prefix contains its ids, in either layout of the layers (of scanned layers the
  fast test is that of rl/test_agreement.py)."""
  engine = recording
  if not unroll:
    engine = EngineApi(dataclasses.replace(CFG, unroll_layers=False), RECORDING)
  tokens, prefix = prompt(4, 20), None
  for begin, end in ((0, 9), (9, 20)):
    padded = np.zeros(32, np.int32)
    padded[: end - begin] = tokens[begin:end]
    prefix = engine.prefill(
      variables,
      existing_prefix=prefix,
      padded_tokens=padded,
      true_length=end - begin,
    )
  slots = decode_state.make_slots(1, RECORDING)
  slots.temperature[:] = 0
  state = engine.insert(prefix, engine.init_decode_state(), 2, slots=slots)
  sampled = []
  for _ in range(3):
    state, result = engine.generate(variables, state)
    sampled.append(int(np.asarray(result.data)[2, 0]))
  pages = 1 + 2 * RECORDING.context_pages + np.arange(6)  # slot 2's
  ids = np.asarray(engine.expert_ids(state, np.int32(0), pages.astype(np.int32)))
  want = full(variables, [*tokens, *sampled])
  np.testing.assert_array_equal(np.sort(ids[:22]), np.sort(want[:22]))


def test_off_and_cancelled(serve, recording):
  """By default nothing is there to pay for (and nothing is recorded: the engines of
  test_low_precision.py); a request that is cancelled before it had a slot has no ids,
  and no one else's."""
  assert Engine(CFG, ENGINE_CONFIG).state_shapes().pages.experts is None
  scheduler = serve(recording, run=False)
  handle = scheduler.submit(request(prompt(1, 5)))
  handle.cancel()
  scheduler.start(warmup=False)
  result = handle.future.result(60)
  assert result.finish_reason == 'cancelled'
  assert len(result.experts) == 5 + len(result.tokens)
  np.testing.assert_array_equal(result.experts, -1)
