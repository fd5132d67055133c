"""Continuous batching: responses do not depend on the rest of the batch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import queue
import threading
import time

import jax
import jax.monitoring
import numpy as np
import pytest

from m2jax.rollout.api import (
  EngineError,
  GenerateRequest,
  PromptTooLong,
  SamplingParams,
)
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from tests.rollout.conftest import CFG, CONTEXT, ENGINE_CONFIG, log_softmax
from tests.rollout.engine.test_engine import prompt
from tests.waiting import wait_until

TIMEOUT_S = 60


def request(tokens, max_tokens=6, **sampling) -> GenerateRequest:
  sampling = SamplingParams(max_tokens=max_tokens, **sampling)
  return GenerateRequest(tuple(int(t) for t in tokens), sampling)


def run(scheduler, *requests):
  handles = [scheduler.submit(r) for r in requests]
  results = [h.future.result(TIMEOUT_S) for h in handles]
  return results[0] if len(results) == 1 else results


def assert_logprobs(reference, variables, tokens, result, atol=1e-4, **kwargs):
  want = reference.logprobs(variables, tokens, result.tokens, **kwargs)
  np.testing.assert_allclose(result.logprobs, want, atol=atol)


def test_greedy_is_the_argmax_of_full_passes(serve, variables, reference):
  """The engine must be the model, chunked prefill and batching included."""
  scheduler = serve()
  prompts = [prompt(i, n) for i, n in enumerate((1, 2, 9, 33, 40, 5))]
  results = run(scheduler, *(request(p, temperature=0.0) for p in prompts))
  for tokens, result in zip(prompts, results, strict=True):
    assert list(result.tokens) == reference.greedy(variables, tokens, 6)
    assert result.finish_reason == 'length'
    assert_logprobs(reference, variables, tokens, result)


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_logprobs_of_hits_copies_and_chunks(serve, variables, reference, temperature):
  """π_old must be right however the prompt's K/V came to be in the slot (law 4)."""
  scheduler = serve()
  sampling = {'temperature': temperature, 'max_tokens': 5}
  shared = prompt(7, 12)
  group = run(scheduler, *(request(shared, **sampling) for _ in range(4)))
  stats = scheduler.stats()
  assert stats['prefill_tokens'] == 11 + 3 * 3  # two pages once for all four
  for result in group:
    assert_logprobs(reference, variables, shared, result, temperature=temperature)
  turns = [shared + list(r.tokens) + prompt(8 + i, 3) for i, r in enumerate(group)]
  before = stats
  results = run(scheduler, *(request(t, **sampling) for t in turns))
  stats = scheduler.stats()
  assert stats['prefix_hit_tokens'] - before['prefix_hit_tokens'] == 4 * 16
  assert stats['prefill_tokens'] - before['prefill_tokens'] == 4 * 3
  assert [result.cached_tokens for result in results] == [16] * 4
  for tokens, result in zip(turns, results, strict=True):
    assert_logprobs(reference, variables, tokens, result, temperature=temperature)


def test_random_arrivals_lose_nothing(serve, variables, reference):
  """More requests than slots, from several threads, of all kinds: all served right."""
  scheduler = serve(prefill_budget_tokens=16)
  random = np.random.default_rng(0)
  stem = prompt(20, 18)
  requests = []
  for i in range(30):
    tokens = stem[: random.integers(1, 18)] + prompt(100 + i, random.integers(0, 20))
    greedy = bool(random.random() < 0.4)
    requests.append(
      request(
        tokens,
        max_tokens=int(random.integers(1, 40)),
        temperature=0.0 if greedy else float(random.choice([0.5, 1.0])),
        stop_ids=tuple(random.integers(CFG.vocab_size, size=2).tolist()),
        seed=int(random.integers(1000)),
      )
    )

  def one(r):
    time.sleep(float(np.random.default_rng(len(r.prompt_ids)).random()) * 0.05)
    return run(scheduler, r)

  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    results = list(pool.map(one, requests))
  for r, result in zip(requests, results, strict=True):
    tokens, sampling = list(r.prompt_ids), r.sampling
    limit = min(sampling.max_tokens, CONTEXT - len(tokens))
    stopped = [t in sampling.stop_ids for t in result.tokens]
    assert not any(stopped[:-1])
    if result.finish_reason == 'stop':
      assert stopped[-1]
    else:
      assert result.finish_reason == 'length' and len(result.tokens) == limit
    assert len(result.logprobs) == len(result.versions) == len(result.tokens)
    temperature = sampling.temperature or 1.0
    assert_logprobs(reference, variables, tokens, result, temperature=temperature)
    if sampling.temperature == 0:
      greedy = reference.greedy(variables, tokens, len(result.tokens))
      assert list(result.tokens) == greedy
  stats = scheduler.stats()
  assert stats['completions'] == 30 and stats['failed'] == 0
  assert stats['queue_length'] == stats['active_slots'] == 0
  assert stats['sampled_tokens'] == sum(len(r.tokens) for r in results)
  assert (
    stats['prompt_tokens'] - 30 == stats['prefix_hit_tokens'] + stats['prefill_tokens']
  )


def test_more_sessions_than_slots_stay_cached(serve, variables, reference):
  """Agents wait for their tools most of the time: a prefix needs pages, not a slot."""
  scheduler = serve()
  sessions = [prompt(i, 7) for i in range(ENGINE_CONFIG.slots + 2)]
  for turn in range(3):
    results = run(scheduler, *(request(s, max_tokens=3) for s in sessions))
    for i, result in enumerate(results):
      assert_logprobs(reference, variables, sessions[i], result)
      sessions[i] = [*sessions[i], *result.tokens, turn]
  assert scheduler.stats()['prefill_tokens'] == len(sessions) * (6 + 2 * 2)


def test_agents_that_answer_at_once_share_their_calls(serve):
  """Agents whose requests end together go on together, turn after turn."""
  agents, turns, steps = ENGINE_CONFIG.slots, 5, 4
  # It ends when all that are expected have arrived, however long that takes.
  scheduler = serve(decode_steps=steps, gather_s=60.0, run=False)
  ended: queue.SimpleQueue = queue.SimpleQueue()

  def ask(agent, tokens):
    def end(future):
      ended.put((agent, [*tokens, *future.result().tokens.tolist(), 7]))

    scheduler.submit(request(tokens, steps)).future.add_done_callback(end)

  for agent in range(agents):
    ask(agent, [agent + 1])
  scheduler.start(warmup=False)
  for turn in range(turns):
    for _ in range(agents):
      agent, tokens = ended.get(timeout=TIMEOUT_S)
      if turn < turns - 1:
        ask(agent, tokens)
  assert scheduler.stats()['decode_calls'] == turns


def test_stopping_does_not_wait_for_more_requests(serve):
  scheduler = serve(gather_s=TIMEOUT_S)
  run(scheduler, request([1], 2))
  started = time.monotonic()
  scheduler.stop()
  assert time.monotonic() - started < TIMEOUT_S / 4


def test_seeds_repeat_in_any_company(serve):
  """An evaluation with seeds must not depend on the load of the server."""
  scheduler = serve()
  mine = [request(prompt(i, 6), max_tokens=12, seed=i) for i in range(3)]
  alone = [run(scheduler, r) for r in mine]
  noise = [request(prompt(50 + i, 9), max_tokens=9, top_k=3) for i in range(5)]
  crowd = run(scheduler, *noise, *mine, *noise)[5:8]
  for a, b in zip(alone, crowd, strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
  again = run(scheduler, dataclasses.replace(mine[0], sampling=noise[0].sampling))
  assert again.tokens.tolist() != alone[0].tokens[:9].tolist()


def test_samples_follow_the_policy(serve, variables, reference):
  """The whole path, prefill to delivery, must sample what it reports."""
  scheduler = serve()
  tokens = prompt(3, 5)
  n = 600
  results = run(scheduler, *(request(tokens, max_tokens=1) for _ in range(n)))
  drawn = np.bincount([r.tokens[0] for r in results], minlength=CFG.vocab_size)
  logits = reference.logits(variables, tokens)[-1]
  want = n * np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
  large = want >= 5
  pooled = np.append(drawn[large], drawn[~large].sum())
  expected = np.append(want[large], want[~large].sum())
  chi_square = np.sum((pooled - expected) ** 2 / expected)
  assert large.sum() > 3
  assert chi_square < large.sum() + 4 * np.sqrt(2 * large.sum())


def test_truncation_reaches_the_device(serve, variables, reference):
  """top_k and top_p of a request apply to its row alone."""
  scheduler = serve()
  tokens = prompt(3, 5)
  narrow = [request(tokens, max_tokens=1, top_k=2) for _ in range(20)]
  narrow += [request(tokens, max_tokens=1, top_p=0.01) for _ in range(20)]
  wide = [request(tokens, max_tokens=1) for _ in range(40)]
  results = run(
    scheduler, *(r for pair in zip(narrow, wide, strict=True) for r in pair)
  )
  ranked = reference.logits(variables, tokens)[-1].argsort()[::-1]
  draws = [r.tokens[0] for r in results[::2]]
  assert set(draws[:20]) == set(ranked[:2].tolist())
  assert set(draws[20:]) == {ranked[0]}
  assert all(lp == 0 for r in results[::2][20:] for lp in r.logprobs)
  assert len({r.tokens[0] for r in results[1::2]}) > 3


def penalised(reference, variables, prompt, result, sampling):
  """[n, V] float64: log-probabilities that each token was drawn with."""
  logits = reference.logits(variables, [*prompt, *result.tokens])[len(prompt) - 1 : -1]
  for i, row in enumerate(logits):
    drawn = result.tokens[:i].tolist()
    for token in {*prompt, *drawn}:
      row[token] *= sampling.repetition_penalty ** (1 if row[token] < 0 else -1)
    for token in set(drawn):
      row[token] -= sampling.presence_penalty
      row[token] -= sampling.frequency_penalty * drawn.count(token)
    for token, bias in sampling.logit_bias:
      row[token] += bias
  return log_softmax(logits / (sampling.temperature or 1.0))


def test_penalties_biases_and_likeliest_tokens(serve, variables, reference):
  """Of each request alone, whatever else is in the batch; tokens of the prompt count
  also when they were found in the prefix cache."""
  scheduler = serve()
  tokens = prompt(3, 14)
  how = [
    dict(presence_penalty=2.0, frequency_penalty=0.5),
    dict(repetition_penalty=1.7, temperature=0.0),
    dict(logit_bias=((5, 4.0), (7, -3.0)), top_logprobs=2),
    dict(top_logprobs=4, temperature=0.7),
    dict(),
  ]
  for _ in range(2):
    requests = [request(tokens, max_tokens=20, **fields) for fields in how]
    results = run(scheduler, *requests)
    for r, result in zip(requests, results, strict=True):
      want = penalised(reference, variables, tokens, result, r.sampling)
      chosen = want[np.arange(len(want)), result.tokens]
      np.testing.assert_allclose(result.logprobs, chosen, atol=2e-4)
      if r.sampling.temperature == 0:
        np.testing.assert_array_equal(result.tokens, want.argmax(axis=1))
      if count := r.sampling.top_logprobs:
        best = np.sort(want)[:, : -count - 1 : -1]
        np.testing.assert_allclose(result.top_logprobs, best, atol=2e-4)
        at = np.take_along_axis(want, result.top_ids, axis=1)
        np.testing.assert_allclose(at, best, atol=2e-4)
      else:
        assert result.top_ids is None
  assert scheduler.stats()['prefix_hit_tokens'] >= 12 * 5


def swap_in_flight(scheduler, other, requests, at_tokens=5, *, start=False):
  """Swaps weights once the first request has some tokens; returns the results.

  With `start` the scheduler is started when it has all requests, so that which of them
  are in flight at the swap does not depend on time.
  """
  swapped = threading.Event()
  seen = []

  def on_tokens(tokens):
    seen.extend(tokens)
    if len(seen) >= at_tokens and not swapped.is_set():
      scheduler.update_weights(other, 1)
      swapped.set()

  first = scheduler.submit(requests[0], on_tokens)
  rest = [scheduler.submit(r) for r in requests[1:]]
  if start:
    scheduler.start(warmup=False)
  return [h.future.result(TIMEOUT_S) for h in (first, *rest)]


def test_weights_swap_in_flight(serve, variables, other_variables, reference):
  """A long rollout does not delay the learner, and its versions are exact."""
  scheduler = serve()
  requests = [request(prompt(i, 6), max_tokens=24) for i in range(3)]
  results = swap_in_flight(scheduler, other_variables, requests)
  for result in results:
    versions = np.array(result.versions)
    assert np.all(np.diff(versions) >= 0) and len(versions) == 24
  versions = np.array(results[0].versions)
  assert set(versions) == {0, 1}
  old = int(np.sum(versions == 0))
  want = reference.logprobs(variables, requests[0].prompt_ids, results[0].tokens)
  np.testing.assert_allclose(results[0].logprobs[:old], want[:old], atol=1e-4)
  fresh = run(scheduler, request(prompt(40, 9)))
  assert set(fresh.versions) == {1}
  assert_logprobs(reference, other_variables, prompt(40, 9), fresh)
  assert scheduler.stats()['policy_version'] == 1


def test_equal_weights_swapped_in_flight_change_nothing(serve, variables, reference):
  """The swap itself must not disturb caches or streams."""
  scheduler = serve()
  same = jax.tree.map(lambda x: x + 0, variables)
  requests = [request(prompt(i, 6), max_tokens=24) for i in range(3)]
  for r, result in zip(
    requests, swap_in_flight(scheduler, same, requests), strict=True
  ):
    assert_logprobs(reference, variables, r.prompt_ids, result)


@pytest.mark.parametrize('reuse', [True, False])
def test_stale_prefixes_as_configured(
  serve, variables, other_variables, reference, reuse
):
  """Reuse trades exactness under the new weights for prefill; off must mean off."""
  scheduler = serve(reuse_stale_prefix=reuse)
  tokens = prompt(9, 14)
  run(scheduler, request(tokens))
  scheduler.update_weights(other_variables, 3)
  result = run(scheduler, request(tokens, max_tokens=8))
  assert set(result.versions) == {3}
  assert scheduler.stats()['prefix_hit_tokens'] == (12 if reuse else 0)
  want = reference.logprobs(other_variables, tokens, result.tokens)
  exact = np.allclose(result.logprobs, want, atol=1e-4)
  assert exact != reuse
  if not reuse:
    run(scheduler, request(tokens))  # the fresh prefix may be used again
    assert scheduler.stats()['prefix_hit_tokens'] == 12


def test_bad_weights_are_refused(serve, variables):
  """Another shape or dtype would recompile everything, or crash the engine later."""
  scheduler = serve()
  scheduler.update_weights(variables, 2)
  with pytest.raises(ValueError, match='version=1'):
    scheduler.update_weights(variables, 1)
  half = jax.tree.map(lambda x: x.astype('bfloat16'), variables)
  with pytest.raises(ValueError, match='dtypes differ'):
    scheduler.update_weights(half, 3)
  assert run(scheduler, request([1, 2])).versions.tolist() == [2] * 6


def test_streaming_gives_every_token_once_before_the_result(serve):
  """The gateway's stream must add up to the recorded response, log-probabilities
  included."""
  scheduler = serve()
  pieces = [[] for _ in range(6)]
  handles = [
    scheduler.submit(
      request(prompt(i, 5), max_tokens=5 + i, top_logprobs=i % 3),
      lambda tokens, mine=pieces[i]: mine.append(tokens),
    )
    for i in range(6)
  ]
  for mine, handle in zip(pieces, handles, strict=True):
    result = handle.future.result(TIMEOUT_S)
    assert len(mine) > 1
    assert [t for piece in mine for t in piece] == result.tokens.tolist()
    logprobs = np.concatenate([piece.logprobs for piece in mine])
    np.testing.assert_array_equal(logprobs, result.logprobs)
    for field in ('top_ids', 'top_logprobs'):
      if (want := getattr(result, field)) is None:
        assert all(getattr(piece, field) is None for piece in mine)
      else:
        got = np.concatenate([getattr(piece, field) for piece in mine])
        np.testing.assert_array_equal(got, want)


def test_cancel_frees_the_slot_and_keeps_what_was_sampled(serve, variables, reference):
  """A client that hangs up must not hold a slot, nor waste its prefix."""
  scheduler = serve()
  started = threading.Event()
  hold = threading.Event()

  def on_tokens(tokens):
    started.set()
    hold.wait(TIMEOUT_S)

  tokens = prompt(1, 6)
  running = [scheduler.submit(request(tokens, 40), on_tokens) for _ in range(4)]
  waiting = scheduler.submit(request(prompt(2, 4), 40))
  assert started.wait(TIMEOUT_S)
  for handle in (*running, waiting):
    handle.cancel()
  hold.set()
  for handle in running:
    result = handle.future.result(TIMEOUT_S)
    assert result.finish_reason == 'cancelled'
    assert len(result.tokens) < 40
    assert_logprobs(reference, variables, tokens, result)
  result = waiting.future.result(TIMEOUT_S)
  assert (len(result.tokens), result.finish_reason) == (0, 'cancelled')
  running[0].cancel()  # after the end: harmless
  assert len(run(scheduler, request(prompt(3, 4))).tokens) == 6
  assert scheduler.stats()['active_slots'] == 0


@pytest.mark.parametrize('end', ['length', 'cancelled'])
def test_who_gets_a_result_finds_the_slot_free(serve, end):
  """Nothing of a request that has ended is in the engine, to the callbacks of its
  future neither."""
  scheduler, found, submitted = serve(), [], threading.Event()

  def on_tokens(_):
    assert submitted.wait(TIMEOUT_S)
    if end == 'cancelled':
      handle.cancel()

  handle = scheduler.submit(request(prompt(1, 5), max_tokens=9), on_tokens)
  handle.future.add_done_callback(lambda _: found.append(scheduler.stats()))
  submitted.set()
  assert handle.future.result(TIMEOUT_S).finish_reason == end
  wait_until(lambda: found)
  (stats,) = found
  assert stats['active_slots'] == 0
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages']


def test_asyncio_cancellation_leaves_the_engine_unharmed(serve):
  """asyncio.wrap_future cancels the future of a client that went away."""
  scheduler = serve()

  async def main():
    handle = scheduler.submit(request(prompt(1, 5), 30))
    future = asyncio.wrap_future(handle.future)
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
      await future
    handle.cancel()
    return await asyncio.wrap_future(scheduler.submit(request([3])).future)

  assert len(asyncio.run(main()).tokens) == 6
  assert scheduler.alive


def test_the_longest_prompt_is_served_and_the_next_refused(serve):
  """The bound must be exact: the last position is for one response token."""
  scheduler = serve()
  result = run(scheduler, request(prompt(1, CONTEXT - 1), max_tokens=9))
  assert (len(result.tokens), result.finish_reason) == (1, 'length')
  with pytest.raises(PromptTooLong, match=f'{CONTEXT} tokens leave no room'):
    scheduler.submit(request(prompt(1, CONTEXT)))


@pytest.mark.parametrize(
  'field, bad',
  [
    ('prompt_ids', GenerateRequest((), SamplingParams(1))),
    ('prompt_ids', GenerateRequest((1, CFG.vocab_size), SamplingParams(1))),
    ('prompt_ids', GenerateRequest((1, -1), SamplingParams(1))),
    ('prompt_ids', GenerateRequest((1.5, 2), SamplingParams(1))),
    ('sampling.max_tokens', request([1], max_tokens=0)),
    ('sampling.temperature', request([1], temperature=-1.0)),
    ('sampling.temperature', request([1], temperature=float('nan'))),
    ('sampling.temperature', request([1], temperature=1e-9)),
    ('sampling.top_p', request([1], top_p=0.0)),
    ('sampling.top_k', request([1], top_k=-1)),
    ('sampling.seed', request([1], seed=1.5)),
    ('sampling.stop_ids', request([1], stop_ids=(CFG.vocab_size,))),
    ('sampling.stop_ids', request([1], stop_ids=(1, 2, 3, 4))),
    ('sampling.min_p', request([1], min_p=1.5)),
    ('sampling.presence_penalty', request([1], presence_penalty=float('inf'))),
    ('sampling.repetition_penalty', request([1], repetition_penalty=0.0)),
    ('sampling.logit_bias', request([1], logit_bias=((CFG.vocab_size, 1.0),))),
    ('sampling.logit_bias', request([1], logit_bias=((1, 1.0),) * 4)),
    ('sampling.logit_bias', request([1], logit_bias=((1, float('nan')),))),
    ('sampling.top_logprobs', request([1], top_logprobs=5)),
  ],
)
def test_a_bad_request_is_refused_by_name(serve, field, bad):
  """Law 9: a clear error that names the field, before anything is spent."""
  with pytest.raises(ValueError, match=f'^{field}'):
    serve(run=False).submit(bad)


class Faulty:
  """An engine whose next decode calls fail."""

  def __init__(self, engine, failures):
    self._engine = engine
    self.failures = failures

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def generate_many(self, *args, **kwargs):
    return self._fail_or(self._engine.generate_many, args, kwargs)

  def generate_kept(self, *args, **kwargs):
    return self._fail_or(self._engine.generate_kept, args, kwargs)

  def _fail_or(self, call, args, kwargs):
    if self.failures:
      self.failures -= 1
      raise RuntimeError('out of memory, say')
    return call(*args, **kwargs)


def test_a_failing_step_fails_its_requests_only(serve, engine, variables, reference):
  """The thread must neither die silently nor serve from a broken state."""
  scheduler = serve(Faulty(engine, 1), run=False)
  handles = [scheduler.submit(request(prompt(i, 5), 8)) for i in range(6)]
  scheduler.start(warmup=False)
  for handle in handles[:4]:
    with pytest.raises(EngineError, match='out of memory, say'):
      handle.future.result(TIMEOUT_S)
  for i, handle in enumerate(handles[4:], start=4):
    result = handle.future.result(TIMEOUT_S)
    assert_logprobs(reference, variables, prompt(i, 5), result)
  assert scheduler.alive
  assert scheduler.stats()['failed'] == 4


def test_steps_that_keep_failing_end_the_service_loudly(serve, engine):
  """Nobody may wait for ever on a dead engine."""
  scheduler = serve(Faulty(engine, 100), run=False, max_failures=2)
  handles = [scheduler.submit(request(prompt(i, 5))) for i in range(12)]
  scheduler.start(warmup=False)
  for handle in handles:
    with pytest.raises(EngineError, match='out of memory, say'):
      handle.future.result(TIMEOUT_S)
  assert not scheduler.alive
  with pytest.raises(EngineError, match='2 steps failed in a row'):
    scheduler.submit(request([1]))


class Unplaceable(Faulty):
  """An engine whose thread places weights in parts, and has no room for the last."""

  loads_in_any_thread = False

  def load_parts(self, variables, part_bytes):
    yield None
    raise RuntimeError('out of memory, say')


def test_weights_that_cannot_be_placed_end_the_service(serve, engine, variables):
  """The old weights must not serve on as the latest, which nobody gives again."""
  scheduler = serve(Unplaceable(engine, 0))
  scheduler.update_weights(variables, 5)
  with pytest.raises(EngineError, match='version 5 cannot be placed'):
    while True:  # requests may be served until the last part
      run(scheduler, request(prompt(1, 5)))
  assert not scheduler.alive and 'version 5' in scheduler.stopped_reason


def test_weights_gone_bad_fail_requests_by_version(serve, variables):
  """A learner that diverged must be named, not trained on further."""
  scheduler = serve()
  nan = jax.tree.map(lambda x: x * np.float32('nan'), variables)
  scheduler.update_weights(nan, 5)
  handle = scheduler.submit(request(prompt(1, 12)))
  with pytest.raises(EngineError, match='version 5 give non-finite logits'):
    handle.future.result(TIMEOUT_S)
  scheduler.update_weights(variables, 6)
  assert len(run(scheduler, request(prompt(1, 12))).tokens) == 6


def test_a_failing_callback_costs_its_own_request(serve):
  """One client's bug must not stop the others' rollouts."""
  scheduler = serve()

  def on_tokens(tokens):
    raise KeyError('client bug')

  bad = scheduler.submit(request(prompt(1, 5)), on_tokens)
  good = scheduler.submit(request(prompt(2, 5)))
  with pytest.raises(EngineError, match='client bug'):
    bad.future.result(TIMEOUT_S)
  assert len(good.future.result(TIMEOUT_S).tokens) == 6
  assert scheduler.alive


def test_stop_fails_what_is_unfinished(serve):
  """A shutdown must release everyone who waits."""
  scheduler = serve(run=False)
  handle = scheduler.submit(request([1]))
  scheduler.stop()
  with pytest.raises(EngineError, match='stopped'):
    handle.future.result(TIMEOUT_S)
  with pytest.raises(EngineError, match='stopped'):
    scheduler.submit(request([1]))


def test_nothing_compiles_after_warmup(engine, variables, other_variables):
  """One compilation in flight costs more than a thousand steps."""
  scheduler = Scheduler(
    engine, variables, config=SchedulerConfig(decode_steps=4)
  ).start()
  compiled = []

  def listen(event, duration, **kwargs):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(kwargs)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    programs = engine.compilations()
    random = np.random.default_rng(1)
    stem = prompt(1, 30)
    for round_ in range(4):
      weights = (variables, other_variables)[round_ % 2]
      # As a learner gives them: fresh from a jitted function, or from the host.
      convert = (jax.device_get, lambda x: x)[round_ // 2]
      scheduler.update_weights(convert(weights), 1 + round_)
      run(
        scheduler,
        *(
          request(
            stem[: random.integers(1, 30)] + prompt(i, random.integers(0, 15)),
            max_tokens=int(random.integers(1, 30)),
            temperature=float(random.choice([0, 1])),
            top_k=int(random.choice([0, 3])),
          )
          for i in range(random.integers(1, 12))
        ),
      )
    assert engine.compilations() == programs
    assert not compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
    scheduler.stop()


def test_config_is_checked_against_the_engine(engine, variables):
  """A decode call cannot take more steps than were compiled into it."""
  with pytest.raises(ValueError, match='decode_steps=9.*max_steps=4'):
    Scheduler(engine, variables, config=SchedulerConfig(decode_steps=9))
  with pytest.raises(ValueError, match='SchedulerConfig.prefill_budget_tokens=0'):
    SchedulerConfig(prefill_budget_tokens=0)
