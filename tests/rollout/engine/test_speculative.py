"""Decoding with drafts: the same tokens as without, whatever the drafts are."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from benchmarks import speculative
from m2jax.forge.processes import lead_engine
from m2jax.rollout.api import EngineError, GenerateRequest, SamplingParams
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.batcher import Batcher
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.sequences import State
from tests import row_model
from tests.rollout import conftest as small
from tests.rollout.conftest import CONTEXT, ENGINE_CONFIG, Reference, init
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import penalised, request, run, swap_in_flight
from tests.rollout.test_lead_engine import Sent, numbered

K = 2
CFG = dataclasses.replace(small.CFG, num_layers=1, num_mtp_modules=K)
# Pages for two sequences of a whole context, so that some are retracted.
CONFIG = dataclasses.replace(
  ENGINE_CONFIG,
  pages=1 + 12 + 14,
  decode_rows=(4,),
  prefill_shapes=((4, 8),),
  contexts=(CONTEXT,),
  record_experts=True,
  draft_tokens=K,
  grammars=True,
)


def agreeing(seed: int, noise: float):
  """Weights of which modules and trunk predict much the same."""
  variables = init(seed, CFG)
  params = dict(variables['params'], head=variables['params']['head'] / 2)
  return speculative.agreeing(CFG, {**variables, 'params': params}, noise)


class Rising:
  """A grammar whose tokens are each greater than the one before."""

  last = -1

  def start(self):
    return Rising()

  def allow(self, mask):
    bits = np.zeros(32 * len(mask), np.uint8)
    bits[self.last + 1 : CFG.vocab_size] = 1
    mask[:] = np.packbits(bits, bitorder='little').view(np.int32)

  def advance(self, tokens):
    (self.last,) = tokens


@pytest.fixture(scope='module')
def drafting():
  return Engine(CFG, CONFIG)


@pytest.fixture(scope='module')
def noisy():
  return agreeing(0, 0.3)


@pytest.fixture(scope='module')
def other():
  return agreeing(1, 0.3)


@pytest.fixture(scope='module')
def full():
  return Reference(CFG)


@pytest.fixture
def plain_and(serve, drafting):
  """plain_and(variables, requests): results without drafts, with K, and stats."""

  def both(variables, requests):
    found = []
    for drafts in (0, K):
      scheduler = serve(drafting, variables, run=False, draft_tokens=drafts)
      handles = [scheduler.submit(r) for r in requests]  # all before the first step
      scheduler.start(warmup=False)
      results = [handle.future.result(60) for handle in handles]
      found.append((results, scheduler.stats()))
    (want, plain), (got, stats) = found
    assert plain['drafted_tokens'] == 0 < stats['drafted_tokens']
    return want, got, stats

  return both


def same(want, got):
  assert got.tokens.tolist() == want.tokens.tolist()
  assert got.finish_reason == want.finish_reason
  np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
  np.testing.assert_array_equal(got.versions, want.versions)
  np.testing.assert_array_equal(np.sort(got.experts), np.sort(want.experts))


WAYS = [
  dict(temperature=0.0),
  dict(),
  dict(temperature=0.7, top_k=9, top_p=0.9),
  dict(min_p=0.1, temperature=1.4),
  dict(presence_penalty=1.0, frequency_penalty=0.5, top_logprobs=2),
  dict(repetition_penalty=1.6, temperature=0.0),
  dict(logit_bias=((5, 3.0), (7, -2.0)), top_logprobs=4),
]


def test_tokens_are_those_of_plain_decoding(plain_and, noisy, full):
  """Shared random numbers: for every way to draw each token is the same and has the
  main model's log-probability, with penalties for the tokens accepted before it in the
  same step, and one record of its experts and likeliest tokens. On few pages sequences
  are retracted, and prompts are found in the prefix cache."""
  requests = [
    request(prompt(i % 5, 9 + 2 * i), max_tokens=20 + i, seed=i, **how)
    for i, how in enumerate(WAYS)
  ]
  want, got, stats = plain_and(noisy, requests)
  assert stats['retractions'] > 0 and stats['failed'] == 0
  assert 0.3 < stats['accepted_tokens'] / stats['drafted_tokens'] < 1
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages']
  for r, a, b in zip(requests, want, got, strict=True):
    same(a, b)
    model = penalised(full, noisy, r.prompt_ids, b, r.sampling)
    if not (r.sampling.top_k or r.sampling.min_p):
      chosen = model[np.arange(len(model)), b.tokens]
      np.testing.assert_allclose(b.logprobs, chosen, atol=2e-4)
    if r.sampling.top_logprobs:
      np.testing.assert_array_equal(a.top_ids, b.top_ids)
      np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, atol=2e-4)


def test_rows_with_a_grammar_have_no_drafts(plain_and, noisy):
  """And draw what they draw without; their neighbours have theirs before and after."""
  requests = [request(prompt(i, 9), max_tokens=6 + 14 * i, seed=i) for i in range(4)]
  for i in (0, 2):
    requests[i] = dataclasses.replace(requests[i], grammar=Rising())
    sampling = dataclasses.replace(requests[i].sampling, stop_ids=(60,))
    requests[i] = dataclasses.replace(requests[i], sampling=sampling)
  want, got, _ = plain_and(noisy, requests)
  for r, a, b in zip(requests, want, got, strict=True):
    same(a, b)
    assert (np.diff(b.tokens) > 0).all() == (r.grammar is not None)


def test_random_modules_change_nothing(plain_and, full):
  """Drafts that are all wrong cost time, not exactness."""
  variables = init(3, CFG)
  requests = [request(prompt(i, 7), max_tokens=15, temperature=0.0) for i in range(3)]
  want, got, stats = plain_and(variables, requests)
  assert stats['accepted_tokens'] < 0.3 * stats['drafted_tokens']
  for r, a, b in zip(requests, want, got, strict=True):
    same(a, b)
    assert b.tokens.tolist() == full.greedy(variables, list(r.prompt_ids), 15)


def test_equal_modules_have_all_drafts_accepted(serve, drafting):
  """Acceptance 1, greedy and drawn: after its first step, which has no drafts, a
  request takes K + 1 tokens a step; it ends at its length or stop token even so."""
  variables = agreeing(0, 0.0)
  scheduler = serve(drafting, variables, draft_tokens=K)
  long = [request(prompt(i, 5), 1 + 3 * (K + 1), temperature=i / 2) for i in range(3)]
  results = run(scheduler, *long)
  assert all(len(r.tokens) == 1 + 3 * (K + 1) for r in results)
  stats = scheduler.stats()
  assert stats['accepted_tokens'] == 3 * 3 * K
  assert stats['mean_accepted_length'] == 3 * (1 + 3 * (K + 1)) / (3 * 4)
  tokens = results[2].tokens.tolist()
  for end in (2, 3, 4, 7):  # tokens that are drafts of the first, and of each position
    stop = tokens[end]
    again = dataclasses.replace(long[2].sampling, stop_ids=(stop,))
    again = dataclasses.replace(again, seed=5), dataclasses.replace(again, max_tokens=4)
    for sampling in again:
      result = run(scheduler, GenerateRequest(long[2].prompt_ids, sampling))
      assert stop not in result.tokens[:-1]
      ended = result.tokens[-1] == stop
      assert result.finish_reason == ('stop' if ended else 'length')
      assert ended or len(result.tokens) == sampling.max_tokens


def test_stop_tokens_inside_a_draft(serve, drafting, noisy, full):
  """Tokens drawn after the stop token in the same step are not part of the response."""
  scheduler = serve(drafting, noisy, draft_tokens=K)
  tokens = prompt(2, 6)
  greedy = full.greedy(noisy, tokens, 24)
  for at in range(1, 12):
    stop = greedy[at]
    r = request(tokens, 24, temperature=0.0, stop_ids=(stop,))
    result = run(scheduler, r)
    assert result.tokens.tolist() == greedy[: greedy.index(stop) + 1]
    assert result.finish_reason == 'stop'


def test_samples_follow_the_policy(serve, drafting, noisy, full):
  """χ² of pairs of tokens, of which the second is a draft or not: the distribution is
  the main model's, not one that leans to what the modules draft."""
  scheduler, tokens, n = serve(drafting, noisy, draft_tokens=K), prompt(3, 5), 1200
  results = run(scheduler, *(request(tokens, max_tokens=3) for _ in range(n)))
  assert scheduler.stats()['accepted_tokens'] > n / 4
  first = np.exp(small.log_softmax(full.logits(noisy, tokens)[-1]))
  drawn, expected = np.zeros((2, CFG.vocab_size, CFG.vocab_size))
  for a in np.flatnonzero(first > 1e-3):
    logits = full.logits(noisy, [*tokens, int(a)])[-1]
    expected[a] = n * first[a] * np.exp(small.log_softmax(logits))
  for r in results:
    drawn[r.tokens[0], r.tokens[1]] += 1
  large = expected >= 5
  pooled = np.append(drawn[large], drawn[~large].sum())
  want = np.append(expected[large], n - expected[large].sum())
  chi_square = np.sum((pooled - want) ** 2 / want)
  assert large.sum() > 20
  assert chi_square < large.sum() + 4 * np.sqrt(2 * large.sum())


def test_weights_swap_in_flight(serve, drafting, noisy, other, full):
  """Drafts of old weights, verified by new ones: versions are exact, each token's
  log-probability is of its version as long as its keys are."""
  scheduler = serve(drafting, noisy, draft_tokens=K)
  requests = [request(prompt(i, 6), max_tokens=36, seed=i) for i in range(2)]
  first, _ = swap_in_flight(scheduler, other, requests)
  old = int(np.sum(first.versions == 0))
  assert 0 < old < 36 and np.all(np.diff(first.versions) >= 0)
  want = full.logprobs(noisy, requests[0].prompt_ids, first.tokens)
  np.testing.assert_allclose(first.logprobs[:old], want[:old], atol=1e-4)
  fresh = run(scheduler, request(prompt(40, 9), 12))
  want = full.logprobs(other, prompt(40, 9), fresh.tokens)
  np.testing.assert_allclose(fresh.logprobs, want, atol=1e-4)


def test_streams_and_cancellations(serve, drafting, noisy):
  """Every token once, in order; a cancelled request keeps what it has."""
  scheduler = serve(drafting, noisy, draft_tokens=K)
  pieces, started, hold = [], threading.Event(), threading.Event()

  def on_tokens(tokens):
    pieces.extend(tokens)
    started.set()
    hold.wait(60)

  handle = scheduler.submit(request(prompt(1, 6), 40, temperature=0.0), on_tokens)
  assert started.wait(60)
  handle.cancel()
  hold.set()
  result = handle.future.result(60)
  assert result.finish_reason == 'cancelled' and 0 < len(result.tokens) < 40
  assert pieces == result.tokens.tolist()
  whole = run(scheduler, request(prompt(1, 6), 40, temperature=0.0))
  assert whole.tokens[: len(pieces)].tolist() == pieces


def job(tokens, max_tokens: int) -> Job:
  sampling = SamplingParams(max_tokens, temperature=0.0)
  tokens = np.array(tokens, np.int32)
  future = concurrent.futures.Future()
  return Job(tokens, GenerateRequest(tokens, sampling), 0, None, future)


@functools.cache
def _states():
  return jax.jit(lambda variables, tokens: row_model.states(variables, tokens, CFG)[0])


def drafts_of(variables, tokens) -> list[int]:
  """The tokens that the modules predict after `tokens`, greedily, by whole rows."""
  tokens = list(map(int, tokens))
  for k in range(1, K + 1):
    padded = np.zeros(CONTEXT + K, np.int32)
    padded[: len(tokens)] = tokens
    state = np.asarray(_states()(variables, padded)[k])[len(tokens) - 1 - k]
    tokens.append(int(np.argmax(state @ np.asarray(variables['params']['head']))))
  return tokens[-K:]


def test_drafts_are_those_of_the_trained_wiring(drafting):
  """Against the row form of facts/algorithms.md §4.1, written apart: drafts of random
  modules, after every call, whatever was computed before in which chunks: prompts in
  several, prefixes found in the cache, drafts that were wrong, retractions."""
  variables = init(5, CFG)
  config = SchedulerConfig(decode_steps=1, draft_tokens=K)
  batcher = Batcher(drafting, drafting.load_params(variables), 0, config)
  stem = prompt(1, 18)
  prompts = [stem[:1], stem[:13], stem + prompt(2, 3), stem[:9], prompt(3, 2), stem]
  batcher.waiting.extend(job(tokens, 16) for tokens in prompts)
  compared = 0
  while batcher.busy:
    batcher.tick()
    table, found = batcher.table, jax.device_get(batcher.state.slots.drafts)
    for slot in table.where(State.DECODE):
      tokens = table.tokens[slot, : table.held[slot] + 1]
      if len(tokens) + K <= CONTEXT:
        assert found[slot].tolist() == drafts_of(variables, tokens), tokens
        compared += 1
  assert compared > 40
  assert batcher.counts['prefix_hit_tokens'] > 20
  assert batcher.drafting.accepted < batcher.drafting.drafted


def test_plain_steps_between(serve, drafting, noisy):
  """Other numbers of drafts may be chosen at any time. The modules have not seen what
  was decoded without them, and predict from what comes after it."""
  scheduler = serve(drafting, noisy, draft_tokens=0)
  requests = [request(prompt(i, 9), max_tokens=30, seed=i) for i in range(2)]
  want = run(scheduler, *requests)
  scheduler = serve(drafting, noisy, run=False)
  choices = iter([0, K, 0, 0, K, K, K, 0, *[K] * 99])
  scheduler.drafting.choose = lambda rows: next(choices)
  got = run(scheduler.start(warmup=False), *requests)
  for a, b in zip(want, got, strict=True):
    same(a, b)
  stats = scheduler.stats()
  assert stats['accepted_tokens'] > 0.3 * stats['drafted_tokens'] > 3


def test_modules_gone_bad_fail_requests_by_version(serve, drafting, noisy):
  """Keys that are not finite would stay in the pages and spread."""
  scheduler = serve(drafting, noisy, draft_tokens=K)
  params = noisy['params']
  broken = jax.tree.map(lambda x: np.full_like(x, np.nan), params['mtp'])
  bad = {**noisy, 'params': {**params, 'mtp': broken}}
  scheduler.update_weights(bad, 5)
  handle = scheduler.submit(request(prompt(1, 12)))
  with pytest.raises(EngineError, match='version 5 give non-finite logits'):
    handle.future.result(60)
  scheduler.update_weights(noisy, 6)
  assert len(run(scheduler, request(prompt(1, 12))).tokens) == 6


def test_numbers_of_drafts_are_checked(drafting, noisy):
  with pytest.raises(ValueError, match='draft_tokens=3 exceeds.*num_mtp_modules=2'):
    Engine(CFG, dataclasses.replace(CONFIG, draft_tokens=3))
  with pytest.raises(ValueError, match='EngineConfig.draft_tokens=-1'):
    dataclasses.replace(CONFIG, draft_tokens=-1)
  for wrong in (3, -1):
    with pytest.raises(ValueError, match=f'SchedulerConfig.draft_tokens={wrong}'):
      Batcher(drafting, noisy, 0, SchedulerConfig(decode_steps=4, draft_tokens=wrong))


class Recorded:
  """An engine, and the tokens that its calls with drafts return."""

  def __init__(self, engine):
    self._engine, self.sampled = engine, []

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def speculate(self, *args):
    state, *found = self._engine.speculate(*args)
    self.sampled.append(jax.device_get(found))
    return state, *found


def test_other_processes_draft_the_same(serve, drafting, noisy):
  """A program of a mesh needs all its processes, with the same arguments."""
  sent, ours, theirs = Sent(), Recorded(drafting), Recorded(drafting)
  scheduler = serve(
    lead_engine.LeadEngine(ours, sent, numbered(noisy)), noisy, draft_tokens=K
  )
  run(scheduler, *(request(prompt(i, 6), 9, seed=i) for i in range(3)))
  scheduler.stop()
  sent.send('stop', reason='')
  lead_engine.follow(theirs, [noisy].__getitem__, sent)
  assert ours.sampled
  jax.tree.map(np.testing.assert_array_equal, theirs.sampled, ours.sampled)


@pytest.mark.long
@pytest.mark.parametrize('unroll', [True, False])
def test_numbers_of_drafts_that_change(serve, unroll):
  """While the scheduler tries all numbers of drafts, with 3 modules over 2 layers, with
  sequences in order and with pages: tokens are those of plain decoding."""
  cfg = dataclasses.replace(small.CFG, num_mtp_modules=3, unroll_layers=unroll)
  variables = init(2, cfg)
  requests = [
    request(prompt(i % 5, 5 + i), max_tokens=25, seed=i, **WAYS[i % len(WAYS)])
    for i in range(14)
  ]
  plain = dataclasses.replace(CONFIG, draft_tokens=0, pages=0)
  want = run(serve(Engine(cfg, plain), variables), *requests)
  drafting = Engine(cfg, dataclasses.replace(plain, draft_tokens=3))
  scheduler = serve(drafting, variables)
  got = run(scheduler, *requests)
  for a, b in zip(want, got, strict=True):
    same(a, b)
  tried = {drafts for _, drafts in scheduler.drafting.ticks}
  assert tried == {0, 1, 2, 3}
  assert drafting.compilations() == 4 + 3  # prefill, admit and expert ids


@pytest.mark.long
def test_no_program_copies_keys_and_values():
  """At M2's size a copy of the pages, even of one layer's, would be most of a step.
  The modules' states, one of each page, are copied once."""
  pages = 5000
  cfg = dataclasses.replace(CFG, unroll_layers=False)
  config = dataclasses.replace(CONFIG, pages=pages, record_experts=False)
  engine = Engine(cfg, config)
  variables, state = init(0, CFG), jax.eval_shape(engine.init_decode_state)
  rows, one = np.zeros(4, np.int32), np.zeros(1, np.int32)
  tables = np.zeros((4, 12), np.int32)
  layer_bytes = pages * 4 * CFG.num_kv_heads * CFG.head_dim * 4
  states_bytes = K * pages * CFG.embed_dim * 4
  for lowered in (
    engine.speculative[K].lower(variables, state, rows, one, tables, one[0]),
    engine.prefill_rows.lower(
      variables, state, np.zeros((4, 8), np.int32), rows, rows, tables
    ),
  ):
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < states_bytes + layer_bytes / 2
