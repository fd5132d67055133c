"""What kind of parameter a leaf is, as data: its name and rank decide, one line each.

Weight decay, Muon and freezing all ask for the kind, never for a name. Layer parameters
are stacked: axes before those listed here (layers L, modules K) are batch axes.

Axes: V vocabulary, D model, N·H query, K·H key/value, E experts, F expert hidden.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import jax


class Kind(enum.StrEnum):
  """Kinds of parameter."""

  EMBEDDING = 'embedding'  # [V, D]: rows are looked up
  HEAD = 'head'  # [D, V]
  NORM = 'norm'  # [D]: scales
  BIAS = 'bias'  # [D]
  MATRIX = 'matrix'  # [in, out]
  ROUTER = 'router'  # [D, E]
  EXPERT = 'expert'  # [E, in, out]


RANK = {
  Kind.EMBEDDING: 2,
  Kind.HEAD: 2,
  Kind.NORM: 1,
  Kind.BIAS: 1,
  Kind.MATRIX: 2,
  Kind.ROUTER: 2,
  Kind.EXPERT: 3,
}

# Last component of a leaf's path -> kind; the first rule that matches in full wins.
RULES: tuple[tuple[str, Kind], ...] = (
  ('embed', Kind.EMBEDDING),
  ('head', Kind.HEAD),
  ('(.*_)?norm', Kind.NORM),
  ('(.*_)?bias', Kind.BIAS),
  ('router', Kind.ROUTER),
  ('gate|up|down', Kind.EXPERT),
  ('q|k|v|o|proj', Kind.MATRIX),
)


def kind_of(path: str, ndim: int) -> Kind:
  """Kind of the leaf at `path` ('layers/q') with `ndim` axes.

  Raises:
    ValueError: no rule knows the name, or the leaf has fewer axes than its kind.
  """
  name = path.rsplit('/', 1)[-1]
  for pattern, kind in RULES:
    if re.fullmatch(pattern, name):
      if ndim < RANK[kind]:
        raise ValueError(
          f'parameter {path} has {ndim} axes; as {kind} it needs at least {RANK[kind]}'
        )
      return kind
  raise ValueError(
    f'parameter {path} is of no known kind: add its name to m2jax.optim.kinds.RULES'
  )


def classify(params: Any) -> Any:
  """The tree of `params` with a Kind for each leaf; raises as `kind_of`."""

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return kind_of(name, leaf.ndim)

  return jax.tree_util.tree_map_with_path(one, params)
