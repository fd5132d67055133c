"""Samples and forests: laws 1 and 2 of the design.

Axes: B rows, S tokens in a row, M loss terms in a row, L layers, k experts of a token,
K words of a teacher; of a sample T tokens, R of them of the response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np

from m2jax.axes import Array, Float, Float32, Int, Int32, unchecked

OLDER_KEYS = -2  # a `Forest.lag`


def _per_token(dtype, fill: int = 0, **options):
  return dataclasses.field(
    metadata=dict(per='token', dtype=dtype, fill=fill), **options
  )


def _per_term(
  dtype,
  fill: int = 0,
  sample: str | None = '',
  default: int = 0,
  optional: bool = False,
):
  """A field with a value for each loss term.

  Args:
    dtype, fill: the array's dtype, and the value of its padding.
    sample: the name of its values in `Sample`; '' is the field's own, None: samples
      have none, and `merge` makes them.
    default: the value where a sample has None.
    optional: the field is None where no sample has values.
  """
  of = dict(per='term', dtype=dtype, fill=fill, sample=sample, default=default)
  none: Any = dict(default=None) if optional else {}
  return dataclasses.field(metadata=of, **none)


def _computed():
  """A field with a value for each loss term, None until a pass has computed it."""
  return _per_term(np.float32, sample=None, optional=True)


@unchecked  # jax also fills it with specs and placeholders
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forest:
  """Rows of prefix trees; token j is visible to token i iff `j <= i < subtree_end[j]`.

  Attributes:
    tokens: ids.
    position: depth from the root: the RoPE index.
    parent: index in the row, -1 at a root and on padding.
    subtree_end: exclusive; 0 on padding, which no token sees.
    multiplicity: number of samples of this row through the token.
    term_token: index in the row of the token a loss term belongs to.
    old_logprob, advantage, weight: each term's values; weight 0 on padding.
    lag: updates between the weights that sampled a term's token and these; -1: unknown;
      OLDER_KEYS: none, but others had sampled the response's beginning.
    term_sample, term_offset: the sample of a term and its offset in that sample's
      response; -1 on padding.
    term_trajectory: number of the sample's trajectory, -1 on padding, or None.
    term_teacher: number of the teacher that a term is distilled from, -1: of none; or
      None.
    reference_logprob, teacher_logprob: each term's log-probability under other weights,
      or None.
    returns: what a critic learns at each term (`rl.critic`), or None.
    completion, trajectory: Σ log π/π_old and number of the terms of the sample, or of
      the trajectory, that a term belongs to (`rl.inputs`); or None.
    experts: recorded expert ids (-1: not replayed), or None.
    teacher_words, teacher_word_logprobs: the teacher's K most likely words at each
      token, given its path, and their log-probabilities (`rl.distillation`); or None.
  """

  # Samples, batching, cutting, sharding and planning read this metadata; a new field is
  # a line here and its use.
  tokens: Int32[Array, 'B S'] = _per_token(np.int32)
  position: Int32[Array, 'B S'] = _per_token(np.int32)
  parent: Int32[Array, 'B S'] = _per_token(np.int32, fill=-1)
  subtree_end: Int32[Array, 'B S'] = _per_token(np.int32)
  multiplicity: Int32[Array, 'B S'] = _per_token(np.int32)
  term_token: Int32[Array, 'B M'] = _per_term(np.int32, sample=None)
  old_logprob: Float32[Array, 'B M'] = _per_term(np.float32, sample='old_logprobs')
  advantage: Float32[Array, 'B M'] = _per_term(
    np.float32, sample='advantages', default=1
  )
  weight: Float32[Array, 'B M'] = _per_term(np.float32, sample='weights', default=1)
  lag: Int32[Array, 'B M'] = _per_term(np.int32, fill=-1, sample='lags', default=-1)
  term_sample: Int32[Array, 'B M'] = _per_term(np.int32, fill=-1, sample=None)
  term_offset: Int32[Array, 'B M'] = _per_term(np.int32, fill=-1, sample=None)
  term_trajectory: Int32[Array, 'B M'] | None = _per_term(
    np.int32, fill=-1, sample='trajectories', default=-1, optional=True
  )
  term_teacher: Int32[Array, 'B M'] | None = _per_term(
    np.int32, fill=-1, sample='teachers', default=-1, optional=True
  )
  reference_logprob: Float[Array, 'B M'] | None = _computed()
  teacher_logprob: Float[Array, 'B M'] | None = _computed()
  returns: Float[Array, 'B M'] | None = _computed()
  completion: Float[Array, 'B M 2'] | None = _computed()
  trajectory: Float[Array, 'B M 2'] | None = _computed()
  experts: Int32[Array, 'B S L k'] | None = _per_token(np.int32, fill=-1, default=None)
  teacher_words: Int32[Array, 'B S K'] | None = _per_token(np.int32, default=None)
  teacher_word_logprobs: Float[Array, 'B S K'] | None = _per_token(
    np.float32, default=None
  )

  @property
  def num_tokens(self) -> int:
    """Number of tokens without padding."""
    return int(np.sum(np.asarray(self.subtree_end) > 0))


FIELDS = {field.name: field.metadata for field in dataclasses.fields(Forest)}
TOKEN_FIELDS = tuple(name for name, of in FIELDS.items() if of['per'] == 'token')
TERM_FIELDS = tuple(name for name, of in FIELDS.items() if of['per'] == 'term')
TEACHER_TOKENS = 'teacher_words', 'teacher_word_logprobs'
OPTIONAL = tuple(f.name for f in dataclasses.fields(Forest) if f.default is None)
# Per-term field → where `merge` finds its values in a sample.
SAMPLED = {
  name: of['sample'] or name
  for name, of in FIELDS.items()
  if of['per'] == 'term' and of['sample'] is not None
}


def _with_terms(cls):
  """The dataclass, with a field for each of `SAMPLED` that it does not name itself."""
  for name in set(SAMPLED.values()) - set(cls.__annotations__):
    cls.__annotations__[name] = Any
    setattr(cls, name, None)
  return cls


@unchecked  # `merge` checks it, with a message for each error
@dataclasses.dataclass(frozen=True)
@_with_terms
class Sample:
  """A token sequence, with the loss terms of its response tokens.

  Attributes:
    tokens: prompt and response.
    prompt_length: number of leading tokens without a loss term.
    old_logprobs, advantages, weights, versions, lags: one value per response token,
      R = T - prompt_length; None means 0, 1, 1, 0 and -1. A token of weight 0 has no
      term.
    trajectories: the number of its trajectory, for each response token.
    teachers: the number of its teacher, or -1, for each response token.
    experts: recorded expert ids, -1 if not recorded. If samples share a token, the
      record of one that sampled it is used (replay.py).
  """

  tokens: Int[np.ndarray, 'T']
  prompt_length: int = 0
  old_logprobs: Float[np.ndarray, 'R'] | None = None
  advantages: Float[np.ndarray, 'R'] | None = None
  weights: Float[np.ndarray, 'R'] | None = None
  versions: Int[np.ndarray, 'R'] | None = None
  lags: Int[np.ndarray, 'R'] | None = None
  trajectories: Int[np.ndarray, 'R'] | None = None
  teachers: Int[np.ndarray, 'R'] | None = None
  experts: Int[np.ndarray, 'T L k'] | None = None


def padding(rows: int, row_tokens: int, row_terms: int) -> Forest:
  """A new forest [rows, row_tokens] of padding, in host arrays."""
  size = {'token': row_tokens, 'term': row_terms}
  return Forest(
    **{
      name: np.full((rows, size[of['per']]), of['fill'], of['dtype'])
      for name, of in FIELDS.items()
      if name not in OPTIONAL
    }
  )


def select(
  batch: Forest,
  index: slice | Sequence[SupportsIndex],
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


def causal(tokens: Int[Array, 'B S']) -> Forest:
  """Rows of one chain each, with a term on every token except the first."""
  xp = np if isinstance(tokens, np.ndarray) else jax.numpy
  batch, length = tokens.shape
  index = xp.broadcast_to(xp.arange(length, dtype=xp.int32), (batch, length))
  ones = xp.ones((batch, length), xp.int32)
  terms = index[:, 1:]
  values = {
    name: xp.full(terms.shape, FIELDS[name]['default'], FIELDS[name]['dtype'])
    for name in SAMPLED
    if name not in OPTIONAL
  }
  return Forest(
    tokens=tokens,
    position=index,
    parent=index - 1,
    subtree_end=length * ones,
    multiplicity=ones,
    term_token=terms,
    term_sample=xp.broadcast_to(xp.arange(batch, dtype=xp.int32)[:, None], terms.shape),
    term_offset=terms - 1,
    **values,
  )
