"""Weights that are replaced while requests run: placed without a pause, told apart."""

from __future__ import annotations

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import records
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine import forward
from m2jax.rollout.engine.pages import empty
from m2jax.rollout.serving import swap
from tests import processes
from tests.rollout import conftest as small

TIMEOUT_S = 60
PROMPT = tuple(range(3, 20))


def request(prompt=PROMPT, **how):
  return GenerateRequest(prompt, SamplingParams(**{'max_tokens': 8} | how))


class Watched:
  """An engine whose weights are ready only after some more decode calls."""

  def __init__(self, engine, calls: int):
    self._engine, self._left = engine, calls
    self.loading, self._decoded = threading.Event(), threading.Event()
    self.first = True

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def load_params(self, params):
    if not self.first:
      self.loading.set()
      assert self._decoded.wait(TIMEOUT_S), 'no decode call while weights were loaded'
    self.first = False
    return self._engine.load_params(params)

  def generate_kept(self, *args):
    if self.loading.is_set():
      self._left -= 1
      if self._left <= 0:
        self._decoded.set()
    return self._engine.generate_kept(*args)


def test_decoding_goes_on_while_weights_are_placed(
  engine, serve, variables, other_variables
):
  """The call that places the new weights waits for decode calls made meanwhile; the
  tokens drawn until then are of the old version, later ones of the new one."""
  watched = Watched(engine, calls=3)
  scheduler = serve(watched)
  drawn = threading.Event()

  def wait_for_the_update(tokens):
    drawn.set()
    assert watched.loading.wait(TIMEOUT_S)

  handle = scheduler.submit(request(PROMPT[:4], max_tokens=40), wait_for_the_update)
  assert drawn.wait(TIMEOUT_S)
  scheduler.update_weights(other_variables, 1)
  result = handle.future.result(TIMEOUT_S)
  versions = result.versions.tolist()
  assert versions == sorted(versions)
  assert versions.count(0) >= 3 * 4  # calls of four steps
  later = scheduler.submit(request()).future.result(TIMEOUT_S)
  assert set(later.versions.tolist()) == {1}


class Swaps:
  """An engine whose first prefill call brings new weights."""

  def __init__(self, engine):
    self._engine, self.update = engine, None

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def prefill_rows(self, *args):
    update, self.update = self.update, None
    if update is not None:
      update()
    return self._engine.prefill_rows(*args)


def test_a_prompt_that_is_half_computed(
  engine, serve, reference, variables, other_variables
):
  """Its first token would see keys of the weights before, and no version says so: it
  begins again, and the response is one of the new weights alone."""
  swaps = Swaps(engine)
  scheduler = serve(swaps, prefill_budget_tokens=1)  # a call per tick
  swaps.update = lambda: scheduler.update_weights(other_variables, 1)
  prompt = tuple(range(3, 42))
  result = scheduler.submit(request(prompt, max_tokens=6)).future.result(TIMEOUT_S)
  assert set(result.versions.tolist()) == {1}
  assert scheduler.stats()['prefill_tokens'] > len(prompt)
  want = reference.logprobs(other_variables, prompt, result.tokens)
  np.testing.assert_allclose(result.logprobs, want, rtol=0, atol=1e-4)


def test_tokens_after_a_swap_see_older_keys(
  engine, serve, reference, variables, other_variables
):
  """What a learner finds in a response of several versions is no error: its new tokens
  have exactly the log-probabilities of the new weights over keys and values of the old
  ones, and those of a forward pass of the new weights are others, by nats."""
  scheduler, updates = serve(), iter([1])

  def update(tokens):  # with the first tokens
    for version in updates:
      scheduler.update_weights(other_variables, version)

  result = scheduler.submit(request(max_tokens=24), update).future.result(TIMEOUT_S)
  old = result.versions.tolist().count(0)
  assert 0 < old < 24
  tokens = np.array([*PROMPT, *result.tokens], np.int32)
  stored = len(PROMPT) + old - 1  # the last token that the old weights drew is not

  @jax.jit
  def extend(variables, pages, tokens, start):
    counts, tables = jnp.array([len(tokens)]), jnp.arange(1, 12)[None]
    rows = forward.Rows(tokens[None], start[None], counts, tables)
    hidden, pages = forward.extend(small.CFG, variables, pages, rows)
    return hidden[0] @ variables['params']['head'], pages

  pages = empty(small.CFG, 12, 4, 'float32', record_experts=False, modules=0)
  _, pages = extend(variables, pages, tokens[:stored], np.int32(0))
  logits, _ = extend(other_variables, pages, tokens[stored:-1], np.int32(stored))
  new = np.arange(24 - old), result.tokens[old:]
  got = result.logprobs[old:]
  np.testing.assert_allclose(
    got, small.log_softmax(np.float64(logits))[new], rtol=0, atol=1e-4
  )
  alone = reference.logprobs(other_variables, PROMPT, result.tokens)[old:]
  assert np.abs(got - alone).max() > 0.1


def test_the_pause_is_measured(serve, other_variables, variables):
  """With a request in flight, from the last decode call before the exchange to the
  first after it; an engine without work has none."""
  scheduler = serve()
  scheduler.update_weights(other_variables, 1)
  scheduler.submit(request()).future.result(TIMEOUT_S)
  assert scheduler.stats()['update_pause_s'] == 0
  updates = iter([2])

  def update(tokens):  # with the first tokens
    for version in updates:
      scheduler.update_weights(variables, version)

  handle = scheduler.submit(request(PROMPT[:4], max_tokens=40), update)
  assert set(handle.future.result(TIMEOUT_S).versions.tolist()) == {1, 2}
  stats = scheduler.stats()
  assert 0 < stats['update_pause_s'] <= stats['update_pause_longest_s'] < TIMEOUT_S


def test_pauses(monkeypatch):
  """Between the end of one decode call and the begin of the next, whatever happens in
  between; of several exchanges without a decode call the first begins the pause."""
  now = 0.0
  monkeypatch.setattr(swap.time, 'monotonic', lambda: now)
  pauses = swap.Pauses()

  def decode(begin, end):
    nonlocal now
    now = begin
    pauses.begin_decode()
    now = end
    pauses.end_decode()

  pauses.exchanged(decoding=False)
  decode(1, 2)
  decode(2.5, 3)
  assert pauses.last_s == 0  # nothing was exchanged
  pauses.exchanged(decoding=True)
  pauses.exchanged(decoding=True)
  decode(5, 6)
  assert pauses.last_s == 2
  pauses.exchanged(decoding=True)
  decode(6.5, 7)
  assert (pauses.last_s, pauses.longest_s) == (0.5, 2)
  pauses.exchanged(decoding=True)
  pauses.idle()  # the only sequence was cancelled
  decode(60, 61)
  assert (pauses.last_s, pauses.longest_s) == (0.5, 2)


def test_parts_are_placed_one_by_one(engine, variables):
  """As small as asked for, and in the end the same weights as at once."""
  count = len(list(engine.load_parts(variables, 1)))
  assert count == len(jax.tree.leaves(variables)) + 1
  *parts, weights = engine.load_parts(variables, 20_000)
  assert 1 < len(parts) < count - 1 and not any(parts)
  at_once = engine.load_params(variables)
  for a, b in zip(*map(jax.tree.leaves, (weights, at_once)), strict=True):
    np.testing.assert_array_equal(a, b)
  one = swap.Swap(engine.load_parts(variables, 20_000), 1)
  steps = 1
  while one.advance(to_the_end=False) is None:
    steps += 1
  assert steps == len(parts) + 1
  whole = swap.Swap(engine.load_parts(variables, 20_000), 1)
  assert whole.advance(to_the_end=True) is not None


def test_a_dead_lineage_is_not_the_living_one(
  engine, serve, reference, variables, other_variables
):
  """A learner that restarts from step 12 trains other weights up to step 13 than before
  its death. The engine goes on: it takes them as newer, though the steps repeat, finds
  none of the pages that the dead ones have computed, and records which of both has
  sampled a token, also within one response."""
  scheduler = serve()
  dead, living = (records.policy_version(lineage, 13) for lineage in (0, 1))
  scheduler.update_weights(variables, dead)
  old = scheduler.submit(request()).future.result(TIMEOUT_S)
  assert records.split_versions(old.versions) == (0, pytest.approx([13] * 8))
  hits, updates = scheduler.stats()['prefix_hit_tokens'], iter([living])

  def update(tokens):  # with the first tokens
    for version in updates:
      scheduler.update_weights(other_variables, version)

  handle = scheduler.submit(request((7, 8, 9), max_tokens=40), update)
  assert set(handle.future.result(TIMEOUT_S).versions.tolist()) == {dead, living}
  new = scheduler.submit(request()).future.result(TIMEOUT_S)
  assert records.split_versions(new.versions) == (1, pytest.approx([13] * 8))
  assert scheduler.stats()['prefix_hit_tokens'] == hits
  np.testing.assert_allclose(
    new.logprobs,
    reference.logprobs(other_variables, PROMPT, new.tokens),
    rtol=0,
    atol=1e-4,
  )
  for late in (records.policy_version(0, 14), records.policy_version(1, 12)):
    with pytest.raises(ValueError, match='must be above'):
      scheduler.update_weights(variables, late)


@pytest.fixture(scope='module')
def meshes():
  child = processes.start('tests.rollout.swap_worker')
  ((out, err),) = processes.finish([child])
  assert out, err[-3000:]
  return json.loads(out.splitlines()[-1])


@pytest.mark.long
def test_from_the_learners_mesh_to_the_engines(meshes):
  """8 devices; the learner's weights are split over fsdp and tensor, the engine's over
  experts and tensor, with requests in flight: every device of the engine gets exactly
  the bits of its part, decoding goes on between the parts, and afterwards the tokens
  are those of the new weights on one device."""
  assert meshes['differing'] == [] and meshes['shards'] > 100
  assert meshes['in_flight'] and meshes['sorted']
  assert meshes['decode_calls_while_placing'] >= 3
  assert meshes['pause_s'] > 0
  assert meshes['tokens_equal'] and meshes['worst_logprob'] < 1e-5
