"""Trajectories with their tokens as a prefix tree, in JSON values.

A bundle has some trajectories of a run, usually a rollout group, and each of their
tokens once per path: completions are paths in a tree of segments, as in the forest that
the learner trains on (laws 1, 2). What was sampled has loss terms (old log-probability,
advantage, weight); a token that several completions sampled has several.

  item          the work item (`pages.ITEM`), or null
  trajectories  fields of `PageReader.trajectory`; `steps`: [kind, text, turn, tool] of
                `observe.transcript`, or null once pruned
  completions   columns of the pool's table; `leaf`: its last segment, null once
                pruned; `logprobs`: in units of 1e-4; `versions`: [version, tokens]
                runs; `weight`: of each of its terms, null if unknown or not in the loss
  segments      [parent or -1, token ids]
  vocab         token id → text, of the ids that occur
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from m2jax import records
from m2jax.forest import trie
from m2jax.observe import transcript
from m2jax.pool.pages import PageReader
from m2jax.rl import terms
from m2jax.text.tokenizer import Tokenizer

LOGPROB_UNIT = 1e-4
_DROPPED = 1e-9  # groups with no larger advantage have no terms (`rl.rewards`)
_STEP_CHARS = 200_000  # of one message; more is omitted


class Bundles:
  """Makes bundles of one run; any thread may call it."""

  def __init__(
    self, reader: PageReader, tok: Tokenizer | None = None, normaliser: str = 'prompt'
  ):
    """`tok`: of the run; None: no text of tokens. `normaliser`: see `terms.weights`."""
    self._reader, self._tok, self._normaliser = reader, tok, normaliser

  def group(self, item: int) -> dict[str, Any] | None:
    """The bundle of a work item; None if there is none."""
    if (found := self._reader.item(item)) is None:
      return None
    return self._bundle(found, self._reader.sessions(item))

  def session(self, session: str) -> dict[str, Any] | None:
    """The bundle of one trajectory; None if there is none."""
    if (found := self._reader.trajectory(session)) is None:
      return None
    return self._bundle(self._reader.item(found[0]['item']), [session])

  def sessions(self, sessions: Sequence[str]) -> dict[str, Any]:
    """The bundle of several evaluations."""
    return self._bundle(None, sessions)

  def _bundle(self, item: dict[str, Any] | None, sessions: Sequence[str]):
    trajectories, columns, recorded = [], [], []
    for session in sessions:
      if (found := self._reader.trajectory(session)) is None:
        continue
      fields, messages = found
      trajectories.append(fields | {'steps': _steps(messages)})
      for fields, record in self._reader.recorded(session):
        columns.append(fields)
        recorded.append(record)
    weight: dict[str, float] = {}
    if item is not None and item['state'] == 'taken':
      weight = self._weights(item['step'])
    superseded = {t['session'] for t in trajectories if t['superseded']}
    known = [i for i, c in enumerate(recorded) if c is not None]
    segments, leaves = tree([recorded[i].tokens for i in known])
    leaf = dict(zip(known, leaves, strict=True))
    for i, (fields, record) in enumerate(zip(columns, recorded, strict=True)):
      trained = not fields['superseded'] and fields['session'] not in superseded
      trained &= fields['advantage'] is not None
      fields['weight'] = weight.get(fields['session']) if trained else None
      fields['leaf'] = leaf.get(i)
      if record is not None:
        fields |= _arrays(record)
    return {
      'item': item,
      'trajectories': trajectories,
      'completions': columns,
      'segments': [[parent, ids.tolist()] for parent, ids in segments],
      'vocab': self._vocab([ids for _, ids in segments]),
    }

  def _weights(self, step: int) -> dict[str, float]:
    """The weight of each term by session; empty if the batch is not known."""
    return weights(self._reader.judged(step) or {}, self._normaliser)

  def _vocab(self, ids: list[np.ndarray]) -> dict[int, str]:
    if self._tok is None or not ids:
      return {}
    used = np.unique(np.concatenate(ids)).tolist()
    return {i: self._tok.decode([i]) for i in used}


def weights(
  judged: dict[int, dict[str, tuple[int, float]]], normaliser: str = 'prompt'
) -> dict[str, float]:
  """Weight of each loss term by session, of a step's batch (`PageReader.judged`).

  Items without a non-zero advantage are dropped, and have none.
  """
  trained = [
    group
    for group in judged.values()
    if max((advantage for _, advantage in group.values()), default=0.0) > _DROPPED
  ]
  lengths = [[tokens for tokens, _ in group.values()] for group in trained]
  found = terms.weights(lengths, normaliser)
  return {
    session: float(weight)
    for group, of_group in zip(trained, found, strict=True)
    for session, weight in zip(group, of_group, strict=True)
  }


def tree(
  tokens: Sequence[np.ndarray],
) -> tuple[list[tuple[int, np.ndarray]], list[int]]:
  """The prefix tree of token sequences: (parent, ids) of its segments, and the leaves.

  A segment is a longest run of tokens without a branch and without an end, so that each
  sequence is the path to the segment that ends it. Parents come first.
  """
  if not tokens:
    return [], []
  order, shared, lengths = trie.build(tokens)
  # Where a sequence's path is cut: at its end, and where another one leaves it.
  segments: list[tuple[int, np.ndarray]] = []
  leaves = [-1] * len(tokens)
  cuts = _cuts(shared.tolist(), lengths.tolist())
  path: list[tuple[int, int]] = []  # (end, segment) of the present sequence
  for place, index in enumerate(order.tolist()):
    while path and path[-1][0] > shared[place]:
      path.pop()
    start = path[-1][0] if path else 0
    for end in cuts[place]:
      if end > start:
        parent = path[-1][1] if path else -1
        segments.append((parent, tokens[index][start:end]))
        path.append((end, len(segments) - 1))
        start = end
    leaves[index] = path[-1][1] if path else -1
  return segments, leaves


def _cuts(shared: list[int], lengths: list[int]) -> list[list[int]]:
  """Depths at which each sorted sequence is cut: its branches and its end."""
  cuts = [{n} for n in lengths]
  open_: list[tuple[int, int]] = []  # (depth of its first own token, sequence)
  for k, depth in enumerate(shared):
    while open_ and open_[-1][0] >= depth:
      open_.pop()
    if open_:  # has the last token that k shares
      cuts[open_[-1][1]].add(depth)
    open_.append((depth, k))
  return [sorted(c) for c in cuts]


def _steps(messages) -> list[list[Any]] | None:
  if messages is None:
    return None
  out = []
  for step in transcript.steps(messages):
    text = step.text
    if len(text) > _STEP_CHARS:
      left = len(text) - _STEP_CHARS
      text = f'{text[:_STEP_CHARS]}\n… {left:,} characters omitted'
    out.append([step.kind, text, step.turn, step.tool])
  return out


def _arrays(c: records.Completion) -> dict[str, Any]:
  changes = np.flatnonzero(np.diff(c.versions)) + 1
  starts = np.concatenate([[0], changes]).astype(int) if len(c.versions) else []
  ends = [*starts[1:], len(c.versions)] if len(c.versions) else []
  return {
    'logprobs': np.round(c.logprobs / LOGPROB_UNIT).astype(int).tolist(),
    'versions': [
      [int(c.versions[a]), int(b - a)] for a, b in zip(starts, ends, strict=True)
    ],
  }
