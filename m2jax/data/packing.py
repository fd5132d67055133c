"""Batches from a stream: full rows of text, or samples under a token budget.

Both iterators are deterministic and carry their whole position in `state()`, a small
JSON-able dict that belongs into the checkpoint's host part beside the ledger (law 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m2jax.data.stream import Stream
from m2jax.forest import Sample


class DocumentRows(Iterator[list[np.ndarray]]):
  """Documents cut and concatenated into rows that are full to the last token.

  A batch is a list of int32 token arrays whose lengths fill `rows` rows of `row_tokens`
  one after the other, so that `forest.chain(batch, row_tokens=…, rows=…)` has no
  padding. A document that reaches a row's end is cut there and goes on in the next row,
  or the next batch, as a chain of its own.

  Only the last batch before the end of `epochs` may be shorter.
  """

  def __init__(
    self,
    documents: Sequence[np.ndarray],
    *,
    row_tokens: int,
    rows: int,
    seed: int | None = 0,
    epochs: int | None = None,
    state: dict[str, Any] | None = None,
  ):
    """Starts at the beginning, or at a `state()` of an iterator over the same source.

    Args:
      documents: source of token arrays (see `stream`); empty ones are passed over.
      row_tokens, rows: S and B of the batch.
      seed: order of the documents; None keeps the source's.
      epochs: passes over the documents; None is endless.
      state: where to go on. `row_tokens` and `rows` may differ from those it was saved
        under: the tokens continue all the same.

    Raises:
      StateMismatch: the state is of another seed or source.
    """
    if row_tokens < 1 or rows < 1:
      raise ValueError(f'row_tokens={row_tokens}, rows={rows}: must be positive')
    self._row_tokens, self._rows = row_tokens, rows
    self._stream = Stream(documents, seed=seed, epochs=epochs)
    self._position = self._offset = 0
    if state is not None:
      self._stream.check(state)
      self._position, self._offset = state['position'], state['offset']
    self._document: np.ndarray | None = None  # the one at `position`, once read

  @property
  def epoch(self) -> int:
    """Passes over the source completed."""
    return self._position // len(self._stream.source)

  def state(self) -> dict[str, Any]:
    """Position of the next token: document in the stream, offset in the document."""
    where = {'position': self._position, 'offset': self._offset}
    return {**self._stream.identity(), **where}

  def __next__(self) -> list[np.ndarray]:
    pieces: list[np.ndarray] = []
    for _ in range(self._rows):
      left = self._row_tokens
      while left:
        piece = self._take(left)
        if piece is None:
          if not pieces:
            raise StopIteration
          return pieces
        pieces.append(piece)
        left -= len(piece)
    return pieces

  def _take(self, most: int) -> np.ndarray | None:
    """The next 1 … `most` tokens of one document; None at the end of the stream."""
    empty = 0
    while True:
      if self._document is None:
        index = self._stream.index(self._position)
        if index is None:
          return None
        self._document = np.asarray(self._stream.source[index], np.int32)
      piece = self._document[self._offset : self._offset + most]
      self._offset += len(piece)
      if self._offset >= len(self._document):
        self._position, self._offset, self._document = self._position + 1, 0, None
      if len(piece):
        return piece
      empty += 1
      if empty >= 2 * len(self._stream.source):  # over a whole epoch, wherever it began
        raise ValueError('every document of the source is empty')


class SampleBatches(Iterator[list[Sample]]):
  """Whole samples, in stream order, as many as fit a budget of tokens.

  The budget counts each sample's tokens in full; `forest.merge` needs fewer where
  samples share prefixes. A batch may hold the end of one epoch and the start of the
  next. Arguments and errors as `DocumentRows`.
  """

  def __init__(
    self,
    samples: Sequence[Sample],
    *,
    tokens_per_batch: int,
    seed: int | None = 0,
    epochs: int | None = None,
    state: dict[str, Any] | None = None,
  ):
    self._budget = tokens_per_batch
    self._stream = Stream(samples, seed=seed, epochs=epochs)
    self._position = 0
    if state is not None:
      self._stream.check(state)
      self._position = state['position']

  @property
  def epoch(self) -> int:
    """Passes over the source completed."""
    return self._position // len(self._stream.source)

  def state(self) -> dict[str, Any]:
    """Position of the next sample in the stream."""
    return {**self._stream.identity(), 'position': self._position}

  def __next__(self) -> list[Sample]:
    batch: list[Sample] = []
    left = self._budget
    while True:
      index = self._stream.index(self._position)
      if index is None:
        break
      sample = self._stream.source[index]
      length = len(sample.tokens)
      if length > self._budget:
        raise ValueError(
          f'sample {index} has {length} tokens, more than '
          f'tokens_per_batch={self._budget}'
        )
      if length > left:
        break
      batch.append(sample)
      left -= length
      self._position += 1
    if not batch:
      raise StopIteration
    return batch
