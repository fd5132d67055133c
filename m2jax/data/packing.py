"""Batches from a stream: full rows of text, or samples within a token budget.

Both iterators are deterministic. Their whole position is `state()`, a small
JSON-serialisable dict for the host part of the checkpoint (law 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m2jax.data.stream import StateMismatch, Stream
from m2jax.forest import Sample


class DocumentRows(Iterator[list[np.ndarray]]):
  """Concatenates and splits documents into rows without padding.

  A batch is a list of int32 token arrays whose lengths fill `rows` rows of `row_tokens`
  in order, so that `forest.chain(batch, row_tokens=…, rows=…)` has no padding. A
  document that reaches the end of a row is split there and continues in the next row of
  its stream, or in the next batch, as a separate chain.

  Rows are filled from `streams` parallel token streams, so that a batch contains at
  least that many documents even if they are long: stream l of L reads the documents at
  positions l, l + L, l + 2L, … of the shuffled order, and fills rows/L consecutive rows
  of every batch. The documents and tokens of a stream depend neither on rows and row
  length nor on the number of hosts: host h of H has the h-th part of the streams and of
  each batch's rows, and reads only those.
  """

  def __init__(
    self,
    documents: Sequence[np.ndarray],
    *,
    row_tokens: int,
    rows: int,
    streams: int = 1,
    host: tuple[int, int] = (0, 1),
    seed: int | None = 0,
    epochs: int | None = None,
    state: dict[str, Any] | None = None,
  ):
    """Starts at the beginning, or at the `state()` of an iterator over the same source.

    Args:
      documents: source of token arrays (see `stream`); empty ones are skipped.
      row_tokens, rows: S and B of the whole batch, over all hosts.
      streams: number of parallel token streams; divides `rows`.
      host: (h, H); H divides `streams`.
      seed: seed of the order of the documents; None uses the source's order.
      epochs: passes over the documents; None is endless. Requires a single stream,
        because streams would end at different batches. The last batch may be shorter.
      state: position to continue from. `row_tokens`, `rows` and `host` may differ from
        those of the save: the tokens of each stream continue regardless. `merge_states`
        combines the states of several hosts.

    Raises:
      StateMismatch: the state has another seed, source or number of streams, or lacks
        the streams of this host.
    """
    if row_tokens < 1 or rows < 1:
      raise ValueError(f'row_tokens={row_tokens}, rows={rows}: must be positive')
    index, hosts = host
    if streams < 1 or rows % streams or hosts < 1 or streams % hosts or index >= hosts:
      raise ValueError(
        f'rows={rows}, streams={streams}, host={host}: streams must divide rows, and '
        'the number of hosts must divide streams'
      )
    if streams > 1 and epochs is not None:
      raise ValueError(
        f'streams={streams}, epochs={epochs}: a number of epochs needs a single stream'
      )
    self._row_tokens, self._count = row_tokens, streams
    self._rows_per_stream = rows // streams
    self._order = Stream(documents, seed=seed, epochs=epochs)
    first = index * (streams // hosts)
    mine = range(first, first + streams // hosts)
    where = {n: (n, 0) for n in mine}
    if state is not None:
      where = self._restore(state, mine)
    self._streams = {
      n: _TokenStream(self._order, streams, position, offset)
      for n, (position, offset) in where.items()
    }

  def state(self) -> dict[str, Any]:
    """Position of each stream of this host: document in the order, offset in it."""
    where = {str(n): [x.position, x.offset] for n, x in self._streams.items()}
    return {**self._order.identity(), 'streams': self._count, 'where': where}

  def __next__(self) -> list[np.ndarray]:
    pieces: list[np.ndarray] = []
    for stream in self._streams.values():
      for _ in range(self._rows_per_stream):
        left = self._row_tokens
        while left:
          piece = stream.take(left)
          if piece is None:
            if not pieces:
              raise StopIteration
            return pieces
          pieces.append(piece)
          left -= len(piece)
    return pieces

  def _restore(self, state: dict[str, Any], mine: range) -> dict[int, tuple[int, int]]:
    self._order.check(state)
    if state.get('streams') != self._count:
      raise StateMismatch(
        'the saved data position does not match: '
        f'streams: saved {state.get("streams")!r}, now {self._count}'
      )
    missing = [n for n in mine if str(n) not in state['where']]
    if missing:
      raise StateMismatch(
        f'the saved data position lacks stream {missing[0]}: it is of other hosts; '
        'combine them with merge_states'
      )
    return {n: tuple(state['where'][str(n)]) for n in mine}


class _TokenStream:
  """The tokens of the documents at every `stride`-th position of an order."""

  def __init__(self, order: Stream, stride: int, position: int, offset: int):
    self._order, self._stride = order, stride
    self.position, self.offset = position, offset
    self._document: np.ndarray | None = None  # the document at `position`, once read

  def take(self, most: int) -> np.ndarray | None:
    """The next 1 … `most` tokens of a document; None at the end of the stream."""
    empty = 0
    while True:
      if self._document is None:
        index = self._order.index(self.position)
        if index is None:
          return None
        self._document = np.asarray(self._order.source[index], np.int32)
      piece = self._document[self.offset : self.offset + most]
      self.offset += len(piece)
      if self.offset >= len(self._document):
        self.position, self.offset = self.position + self._stride, 0
        self._document = None
      if len(piece):
        return piece
      empty += 1
      if empty >= 2 * len(self._order.source):  # at least one whole epoch
        raise ValueError(
          f'{empty} documents without tokens in a row: probably all documents of the '
          'source are empty'
        )


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Combines the states of the hosts of a `DocumentRows`, in any order.

  Raises:
    StateMismatch: they are of different iterators, or some hosts are missing.
  """
  where = {n: at for state in states for n, at in state['where'].items()}
  merged = {**states[0], 'where': where}
  # Hosts that read the same streams are at the same positions.
  apart = any(where[n] != at for state in states for n, at in state['where'].items())
  if apart or any({**state, 'where': where} != merged for state in states):
    raise StateMismatch('the data positions to merge are of different iterators')
  if len(where) != merged['streams']:
    raise StateMismatch(
      f'the data positions to merge have {len(where)} of {merged["streams"]} streams'
    )
  return merged


class SampleBatches(Iterator[list[Sample]]):
  """Whole samples, in stream order, up to a budget of tokens.

  Samples come in groups, such as the turns of a conversation whose prompts differ. A
  group is contiguous, and may end in the next batch. The budget counts a prefix that
  samples of a group share in a batch once, as `forest.merge` computes it; prefixes that
  groups have in common save more. A batch may contain the end of one epoch and the
  start of the next. `seed`, `epochs`, `state` and errors are as in `DocumentRows`.
  """

  def __init__(
    self,
    groups: Sequence[Sequence[Sample]],
    *,
    tokens_per_batch: int,
    seed: int | None = 0,
    epochs: int | None = None,
    state: dict[str, Any] | None = None,
  ):
    self._budget = tokens_per_batch
    self._stream = Stream(groups, seed=seed, epochs=epochs)
    self._position = self._offset = 0
    if state is not None:
      self._stream.check(state)
      self._position, self._offset = state['position'], state.get('offset', 0)

  def state(self) -> dict[str, Any]:
    """Group of the next sample in the stream, and its place in it."""
    where = {'position': self._position, 'offset': self._offset}
    return {**self._stream.identity(), **where}

  def __next__(self) -> list[Sample]:
    batch: list[Sample] = []
    left = self._budget
    while (index := self._stream.index(self._position)) is not None:
      group, first = self._stream.source[index], self._offset
      for sample in group[first:]:
        if len(sample.tokens) > self._budget:
          raise ValueError(
            f'a sample of group {index} has {len(sample.tokens)} tokens, more than '
            f'tokens_per_batch={self._budget}'
          )
        before = group[first : self._offset]
        cost = len(sample.tokens) - max((_common(sample, x) for x in before), default=0)
        if cost > left:
          return batch
        batch.append(sample)
        left -= cost
        self._offset += 1
      self._position, self._offset = self._position + 1, 0
    if not batch:
      raise StopIteration
    return batch


def _common(a: Sample, b: Sample) -> int:
  """Length of the common prefix."""
  n = min(len(a.tokens), len(b.tokens))
  differ = np.asarray(a.tokens[:n]) != np.asarray(b.tokens[:n])
  return int(differ.argmax()) if differ.any() else n
