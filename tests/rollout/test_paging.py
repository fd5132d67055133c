"""Few pages: sequences are retracted and go on as if they had not been."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from m2jax.rollout.api import GenerateRequest
from tests.rollout import soak as soak_lib
from tests.rollout.test_engine import prompt
from tests.rollout.test_scheduler import (
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
  serve, few, variables, other_variables, reference
):
  """Weights change in between: tokens that the old ones drew get K/V of the new ones,
  but their log-probabilities, versions and expert ids stay those of the old ones."""
  scheduler = serve(few)
  first, *_ = found = swap_in_flight(scheduler, other_variables, REQUESTS)
  assert scheduler.stats()['retractions'] > 0
  assert set(np.concatenate([r.versions for r in found]).tolist()) == {0, 1}
  for r, result in zip(REQUESTS, found, strict=True):
    old = int(np.sum(result.versions == 0))
    want = reference.logprobs(variables, r.prompt_ids, result.tokens)
    np.testing.assert_allclose(result.logprobs[:old], want[:old], atol=1e-4)
    assert (result.experts[:-1] >= 0).all() and (result.experts[-1] == -1).all()
  assert np.all(np.diff(first.versions) >= 0)


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


def test_soak(few):
  """No page is lost and no token is of other weights than its version says."""
  found = soak_lib.soak(150, engine=few)
  assert found['checked'] > 50 and found['retractions'] > 0
  assert found['cancelled'] > 2 and found['weight_updates'] > 3


@pytest.mark.long
def test_long_soak(few):
  """The same for minutes; `python -m tests.rollout.soak` runs 20,000 requests."""
  found = soak_lib.soak(2000, seed=1, engine=few)
  assert found['checked'] > 500 and found['evicted_pages'] > 500
