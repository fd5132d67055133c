"""Few pages: sequences are retracted and go on as if they had not been."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest

from m2jax.rollout.api import GenerateRequest
from m2jax.rollout.tiers.page_layout import Layout
from tests.rollout import soak as soak_lib
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import (
  assert_logprobs,
  penalised,
  request,
  run,
  swap_in_flight,
)

REQUESTS = [request(prompt(i, 7), max_tokens=36, seed=i) for i in range(4)]


def test_retracted_sequences_draw_the_same_tokens(
  serve, few, recording, variables, reference
):
  """With the log-probabilities of the model, penalties for what they had drawn before,
  and one record of expert ids and likeliest tokens for each."""
  how = dict(presence_penalty=0.5, frequency_penalty=0.2, top_logprobs=2)
  requests = [
    GenerateRequest(r.prompt_ids, dataclasses.replace(r.sampling, **how))
    for r in REQUESTS
  ]
  scheduler = serve(recording)
  want = run(scheduler, *requests)
  assert scheduler.stats()['retractions'] == 0
  scheduler = serve(few)
  got, stats = run(scheduler, *requests), scheduler.stats()
  assert stats['retractions'] > 2 and stats['failed'] == 0
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages'] == 18
  for r, a, b in zip(requests, want, got, strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    model = penalised(reference, variables, r.prompt_ids, b, r.sampling)
    chosen = model[np.arange(len(model)), b.tokens]
    np.testing.assert_allclose(b.logprobs, chosen, atol=2e-4)
    np.testing.assert_array_equal(a.top_ids, b.top_ids)
    np.testing.assert_array_equal(np.sort(a.experts), np.sort(b.experts))
    np.testing.assert_array_equal(b.versions, 0)


def test_retracted_tokens_keep_their_version_and_experts(
  serve, few, recording, variables, other_variables, reference
):
  """Weights change in between. What the old ones drew stays theirs in everything, as
  in a request that nothing disturbs, although its K/V are then those of the new ones;
  what is drawn afterwards is what the new weights draw for that prefix."""
  scheduler = serve(few, run=False)
  placed = placements(scheduler)
  found = swap_in_flight(scheduler, other_variables, REQUESTS, start=True)
  assert scheduler.stats()['retractions'] > 0
  undisturbed = run(serve(recording), *REQUESTS)
  fresh, kept = serve(recording, other_variables), 0
  for r, want, result in zip(REQUESTS, undisturbed, found, strict=True):
    n, old = len(r.prompt_ids), int(np.sum(result.versions == 0))
    assert result.versions.tolist() == [0] * old + [1] * (36 - old)
    assert result.tokens[:old].tolist() == want.tokens[:old].tolist()
    np.testing.assert_allclose(result.logprobs[:old], want.logprobs[:old], atol=1e-5)
    consumed = n + old - 1 if old else 0  # tokens of which the old ones made K/V
    same_experts(result.experts[:consumed], want.experts[:consumed])
    assert (result.experts[-1] == -1).all()
    drawn, version = placed[r.prompt_ids][-1]
    if version == 1:  # then all K/V are those of the new weights
      tokens = (*r.prompt_ids, *result.tokens.tolist())
      again = run(fresh, request(tokens[:-1], max_tokens=1))
      after = slice(max(consumed, n + drawn - 1), -1)
      same_experts(result.experts[after], again.experts[after])
      want = reference.logprobs(other_variables, r.prompt_ids, result.tokens)
      np.testing.assert_allclose(result.logprobs[drawn:], want[drawn:], atol=1e-4)
      kept += 0 < old <= drawn < 36
  assert kept  # tokens of the old weights were retracted, and went on by the new ones


def placements(scheduler):
  """A dict that the scheduler fills: for each prompt, whenever it gets a slot, how many
  tokens had been drawn and the version of the weights."""
  batcher, found = scheduler._batcher, collections.defaultdict(list)
  take = batcher._take

  def noted(job, hit):
    found[job.request.prompt_ids].append((len(job.logprobs), batcher.version))
    take(job, hit)

  batcher._take = noted
  return found


def same_experts(one, other):
  """In any order: scores that are nearly equal may change places."""
  np.testing.assert_array_equal(np.sort(one), np.sort(other))


def test_a_cancelled_sequence_that_was_retracted(serve, few, variables, reference):
  """Has what it had drawn, and costs no page."""
  scheduler = serve(few)
  drawn = [[] for _ in REQUESTS]
  handles = [
    scheduler.submit(r, mine.extend) for r, mine in zip(REQUESTS, drawn, strict=True)
  ]
  handles[0].future.result(60)
  assert scheduler.stats()['retractions'] > 0
  for handle in handles:
    handle.cancel()
  for r, handle, mine in zip(REQUESTS, handles, drawn, strict=True):
    result = handle.future.result(60)
    assert result.tokens.tolist() == mine  # each streamed once
    assert_logprobs(reference, variables, r.prompt_ids, result)
  assert run(scheduler, request(prompt(9, 30), max_tokens=18)).tokens.size == 18


def test_memory_is_bounded_by_the_page_budget(serve, few):
  """Twice as many requests as have room: all pages are used, none beyond the budget,
  and the cache is as large on the device as its budget says, before and after."""
  scheduler = serve(few)
  layout = Layout.of(few.state_shapes().pages)
  budget_bytes = few.config.pages * layout.page_bytes
  assert scheduler.stats()['page_bytes'] == budget_bytes
  fit = (few.config.pages - 1) // few.config.pages_of(7 + 36)
  requests = [request(prompt(i, 7), max_tokens=36) for i in range(2 * max(fit, 4))]
  for result in run(scheduler, *requests):
    assert result.tokens.size == 36
  stats = scheduler.stats()
  assert stats['retractions'] > 0 and stats['failed'] == 0
  assert stats['peak_pages'] == stats['pages'] == few.config.pages - 1
  pages = jax.tree.leaves(scheduler._batcher.state.pages)
  assert stats['page_bytes'] == sum(x.nbytes for x in pages) == budget_bytes


def test_soak(few):
  """No page is lost and no token is of other weights than its version says."""
  found = soak_lib.soak(80, engine=few)
  assert found['checked'] > 50 and found['spans'] > 4 and found['retractions'] > 0
  assert found['cancelled'] and found['weight_updates'] > 1
  assert found['ahead_calls'] > 1


@pytest.mark.thorough  # minutes; the fast tests have a short one
def test_long_soak(few_of_all_shapes):
  """The same for minutes; `python -m tests.rollout.soak` runs 20,000 requests."""
  found = soak_lib.soak(2000, seed=1, engine=few_of_all_shapes)
  assert found['checked'] > 500 and found['evicted_pages'] > 500
