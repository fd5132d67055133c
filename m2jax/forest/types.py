"""Samples and forests: laws 1 and 2 of the design.

Axes: B rows, S tokens in a row, M loss terms in a row, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sample:
  """A token sequence, with the loss terms of its response tokens.

  Attributes:
    tokens: int ids, prompt and response.
    prompt_length: number of leading tokens without a loss term.
    old_logprobs, advantages, weights, versions: one value per response token, length
      `len(tokens) - prompt_length`; None means 0, 1, 1 and 0. A token of weight 0 has
      no term.
    experts: [len(tokens), L, top_k] recorded expert ids, -1 if not recorded. If samples
      share a token, the record of one that sampled it is used (replay.py).
  """

  tokens: np.ndarray
  prompt_length: int = 0
  old_logprobs: np.ndarray | None = None
  advantages: np.ndarray | None = None
  weights: np.ndarray | None = None
  versions: np.ndarray | None = None
  experts: np.ndarray | None = None


def _per_token(dtype, fill: int = 0, **options):
  return _field('token', dtype, fill, options)


def _per_term(dtype, fill: int = 0, **options):
  return _field('term', dtype, fill, options)


def _field(per: str, dtype, fill: int, options):
  return dataclasses.field(metadata=dict(per=per, dtype=dtype, fill=fill), **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forest:
  """Rows of prefix trees; token j is visible to token i iff `j <= i < subtree_end[j]`.

  Attributes:
    tokens: [B, S] int32.
    position: [B, S] int32, depth from the root: the RoPE index.
    parent: [B, S] int32, index in the row, -1 at a root and on padding.
    subtree_end: [B, S] int32, exclusive; 0 on padding, which no token sees.
    multiplicity: [B, S] int32, number of samples of this row through the token.
    term_token: [B, M] int32, index in the row of the token a loss term belongs to.
    old_logprob, advantage, weight: [B, M] float32; weight 0 on padding.
    term_sample, term_offset: [B, M] int32, the sample of a term and its offset in that
      sample's response; -1 on padding.
    experts: [B, S, L, top_k] int32 recorded expert ids (-1: not replayed), or None.
  """

  # Batching, cutting, sharding and planning use this metadata: axis, dtype and fill.
  tokens: np.ndarray = _per_token(np.int32)
  position: np.ndarray = _per_token(np.int32)
  parent: np.ndarray = _per_token(np.int32, fill=-1)
  subtree_end: np.ndarray = _per_token(np.int32)
  multiplicity: np.ndarray = _per_token(np.int32)
  term_token: np.ndarray = _per_term(np.int32)
  old_logprob: np.ndarray = _per_term(np.float32)
  advantage: np.ndarray = _per_term(np.float32)
  weight: np.ndarray = _per_term(np.float32)
  term_sample: np.ndarray = _per_term(np.int32, fill=-1)
  term_offset: np.ndarray = _per_term(np.int32, fill=-1)
  experts: np.ndarray | None = _per_token(np.int32, fill=-1, default=None)

  @property
  def num_tokens(self) -> int:
    """Number of tokens without padding."""
    return int(np.sum(np.asarray(self.subtree_end) > 0))


FIELDS = {field.name: field.metadata for field in dataclasses.fields(Forest)}
TOKEN_FIELDS = tuple(name for name, of in FIELDS.items() if of['per'] == 'token')
TERM_FIELDS = tuple(name for name, of in FIELDS.items() if of['per'] == 'term')


def padding(rows: int, row_tokens: int, row_terms: int) -> Forest:
  """A new forest [rows, row_tokens] of padding, in host arrays."""
  size = {'token': row_tokens, 'term': row_terms}
  return Forest(
    **{
      name: np.full((rows, size[of['per']]), of['fill'], of['dtype'])
      for name, of in FIELDS.items()
      if name != 'experts'
    }
  )


def select(
  batch: Forest,
  index: slice | Sequence[int],
  *,
  rows: int | None = None,
  row_tokens: int | None = None,
  row_terms: int | None = None,
) -> Forest:
  """Rows `index` of host arrays, padded to `rows`, truncated or padded to S and M."""
  size = {'token': row_tokens, 'term': row_terms}
  out = {}
  for name, of in FIELDS.items():
    if (values := getattr(batch, name)) is None:
      continue
    length = size[of['per']]
    values = values[index, :length]
    pad = [(0, 0)] * values.ndim
    for axis, want in enumerate((rows, length)):
      if want is not None:
        pad[axis] = 0, want - values.shape[axis]
    out[name] = np.pad(values, pad, constant_values=of['fill'])
  return Forest(**out)


def causal(tokens: jax.Array) -> Forest:
  """Rows [B, S] of one chain each, with a term on every token except the first."""
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
