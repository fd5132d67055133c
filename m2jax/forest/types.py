"""What goes into a forest and what it is: laws 1 and 2 of the design.

Axes: B rows, S tokens in a row, M loss terms in a row, L layers.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sample:
  """One token sequence and what its response tokens weigh in the loss.

  Attributes:
    tokens: int ids, prompt and response.
    prompt_length: leading tokens without a loss term.
    old_logprobs, advantages, weights, versions: one value per response token, length
      `len(tokens) - prompt_length`; None means 0, 1, 1 and 0. A token of weight 0 has
      no term.
    experts: [len(tokens), L, top_k] recorded expert ids, -1 where not recorded. Where
      samples share a token, the record of one that sampled it holds (replay.py).
  """

  tokens: np.ndarray
  prompt_length: int = 0
  old_logprobs: np.ndarray | None = None
  advantages: np.ndarray | None = None
  weights: np.ndarray | None = None
  versions: np.ndarray | None = None
  experts: np.ndarray | None = None


# What a Forest has for every token of a row, [B, S, …].
TOKEN_FIELDS = (
  'tokens',
  'position',
  'parent',
  'subtree_end',
  'multiplicity',
  'experts',
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forest:
  """Rows of prefix trees; token j is visible to token i iff `j <= i < subtree_end[j]`.

  Attributes:
    tokens: [B, S] int32.
    position: [B, S] int32, depth from the root: the RoPE index.
    parent: [B, S] int32, index in the row, -1 at a root and on padding.
    subtree_end: [B, S] int32, exclusive; 0 on padding, which sees and is seen by none.
    multiplicity: [B, S] int32, samples of this row that pass through the token.
    term_token: [B, M] int32, index in the row of the token a loss term belongs to.
    old_logprob, advantage, weight: [B, M] float32; weight 0 on padding.
    term_sample, term_offset: [B, M] int32, the sample a term came from and its offset
      in that sample's response; -1 on padding.
    experts: [B, S, L, top_k] int32 recorded expert ids (-1: route freely), or None.
  """

  tokens: np.ndarray
  position: np.ndarray
  parent: np.ndarray
  subtree_end: np.ndarray
  multiplicity: np.ndarray
  term_token: np.ndarray
  old_logprob: np.ndarray
  advantage: np.ndarray
  weight: np.ndarray
  term_sample: np.ndarray
  term_offset: np.ndarray
  experts: np.ndarray | None = None

  @property
  def num_tokens(self) -> int:
    """Tokens that are not padding."""
    return int(np.sum(np.asarray(self.subtree_end) > 0))


def padding(rows: int, row_tokens: int, row_terms: int) -> Forest:
  """A forest [rows, row_tokens] of nothing but padding; host arrays of its own."""

  def full(columns, dtype, fill=0):
    return np.full((rows, columns), fill, dtype)

  return Forest(
    tokens=full(row_tokens, np.int32),
    position=full(row_tokens, np.int32),
    parent=full(row_tokens, np.int32, -1),
    subtree_end=full(row_tokens, np.int32),
    multiplicity=full(row_tokens, np.int32),
    term_token=full(row_terms, np.int32),
    old_logprob=full(row_terms, np.float32),
    advantage=full(row_terms, np.float32),
    weight=full(row_terms, np.float32),
    term_sample=full(row_terms, np.int32, -1),
    term_offset=full(row_terms, np.int32, -1),
  )


def causal(tokens: jax.Array) -> Forest:
  """Rows [B, S] of one whole chain each, with a term on every token but the first."""
  xp = np if isinstance(tokens, np.ndarray) else jax.numpy
  batch, length = tokens.shape
  index = xp.broadcast_to(xp.arange(length, dtype=xp.int32), (batch, length))
  ones = xp.ones((batch, length), xp.int32)
  terms = index[:, 1:]
  floats = xp.ones(terms.shape, xp.float32)
  return Forest(
    tokens=tokens,
    position=index,
    parent=index - 1,
    subtree_end=length * ones,
    multiplicity=ones,
    term_token=terms,
    old_logprob=0 * floats,
    advantage=floats,
    weight=floats,
    term_sample=xp.broadcast_to(xp.arange(batch, dtype=xp.int32)[:, None], terms.shape),
    term_offset=terms - 1,
  )
