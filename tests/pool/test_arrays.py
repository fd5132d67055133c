"""Prompts are stored once, and restored token by token."""

from __future__ import annotations

import dataclasses
import tempfile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2jax.pool import arrays
from m2jax.pool.data_pool import DataPool
from m2jax.records import WorkItem
from tests.pool.test_data_pool import completion, trajectory

LAYERS, TOP_K = 2, 3


@st.composite
def sessions(draw):
  """Completions of one session: extensions, forks, parents that are no prefix."""
  rng = np.random.default_rng(draw(st.integers(0, 999)))
  record_experts = draw(st.booleans())
  out = []
  for turn in range(draw(st.integers(1, 8))):
    parent = draw(st.sampled_from([None, *out]))
    ids = tuple(rng.integers(0, 50, draw(st.integers(0, 6))).tolist())
    prompt = ids
    if parent is not None:
      base = tuple(parent.tokens.tolist())
      if draw(st.integers(0, 4)) == 0:
        base = base[:-1]  # a parent that the prompt does not extend
      prompt = base + ids
    n = draw(st.integers(0, 5))
    experts = None
    if record_experts and draw(st.integers(0, 4)):
      experts = rng.integers(-1, 9, (len(prompt) + n, LAYERS, TOP_K)).astype(np.int16)
      same = parent is not None and parent.experts is not None
      if same and draw(st.booleans()):  # as a prefix cache gives them
        shared = min(max(0, len(parent.experts) - 1), len(experts))
        experts[:shared] = parent.experts[:shared]
    out.append(
      completion(
        's',
        turn,
        parent=parent.id if parent is not None else None,
        prompt_ids=prompt,
        response_ids=tuple(rng.integers(0, 50, n).tolist()),
        logprobs=rng.normal(size=n),
        versions=tuple(rng.integers(0, 9, n).tolist()),
        experts=experts,
      )
    )
  return out


def same(got, want):
  assert got == want
  assert (got.experts is None) == (want.experts is None)
  if want.experts is not None:
    np.testing.assert_array_equal(got.experts, want.experts)


@given(sessions(), st.data())
def test_sessions_come_back_exactly(session, data):
  """Any tree of completions is restored exactly, for any batches and across a restart
  of the process: every bit of log-probabilities, every position of expert ids."""
  with tempfile.TemporaryDirectory() as directory:
    url = f'sqlite:///{directory}/pool.db'
    pool = DataPool(url, linger_s=0.0)
    pool.submit(WorkItem(0, 't', 1))
    for c in session:
      pool.add_completion(c)
      match data.draw(st.sampled_from(['', '', 'flush', 'reopen'])):
        case 'flush':
          pool.flush()
        case 'reopen':
          pool.close()
          pool = DataPool(url, linger_s=0.0)
    pool.add_trajectory(trajectory('s', 0))
    pool.flush()
    for got, want in zip(pool.completions('s'), session, strict=True):
      same(got, want)
    ((_, group),) = pool.group(0)
    for got, want in zip(group, session, strict=True):
      same(got, want)
    pool.close()


def test_a_session_grows_by_its_new_tokens():
  """Each blob of twenty turns of random ids holds only its own tokens: together hardly
  more than the last prompt, not twenty times as much."""
  rng = np.random.default_rng(0)
  parent, blobs, tokens = None, [], ()
  for turn in range(20):
    prompt = tokens + tuple(rng.integers(0, 2**31, 300).tolist())
    c = completion(
      's',
      turn,
      parent=parent.id if parent is not None else None,
      prompt_ids=prompt,
      response_ids=tuple(rng.integers(0, 2**31, 50).tolist()),
      logprobs=(-1.0,) * 50,
      versions=(3,) * 50,
    )
    blobs.append(arrays.pack(c, parent))
    parent, tokens = c, tuple(c.tokens.tolist())
  assert sum(map(len, blobs)) < 1.2 * 4 * len(tokens)
  assert max(map(len, blobs)) < 2 * min(map(len, blobs))


def test_only_true_prefixes_are_left_out():
  """A blob does not refer to a parent of another session, or one whose ids the prompt
  does not extend."""
  parent = completion('s')  # (1, 2, 3) and (4, 5)
  child = completion('s', 1, parent='s/0', prompt_ids=(1, 2, 3, 4, 5, 6))
  whole = len(arrays.pack(child, None))
  assert len(arrays.pack(child, parent)) == whole - 5 * 4
  for other in (
    dataclasses.replace(parent, session='t'),
    dataclasses.replace(parent, id='x'),
    dataclasses.replace(parent, response_ids=(4, 6)),
    dataclasses.replace(parent, response_ids=(4, 5, 6, 7)),
  ):
    assert len(arrays.pack(child, other)) == whole


def test_what_is_remembered_is_bounded():
  """Bounded in bytes, including expert ids: evicts the oldest, and ended sessions."""
  recent = arrays.Recent(max_bytes=4000)
  for key in 'abc':  # of about 1,500 bytes each
    recent.add(completion(key))
  assert recent.get('a/0') is None
  assert recent.get('b/0') and recent.get('c/0')
  recent.drop({'c'})
  assert recent.get('c/0') is None and recent.get('b/0')
  recent.add(completion('d'))
  assert recent.get('b/0') and recent.get('d/0') and recent.get(None) is None
  recent.add(completion('e', experts=np.zeros((5, 40, 8), np.int16)))  # and 3,200
  assert not any(recent.get(f'{key}/0') for key in 'abcd')
