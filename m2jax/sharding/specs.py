"""PartitionSpecs of whole trees: variables, optimizer state, batches."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from m2jax import params as params_lib
from m2jax.config import ModelConfig
from m2jax.forest import TERM_FIELDS, TOKEN_FIELDS, Forest
from m2jax.sharding.rules import Rules


def param_specs(cfg: ModelConfig, rules: Rules) -> dict[str, Any]:
  """PartitionSpecs of the model's variables {'params': …, 'router': …}."""

  def leaf(name, param, stacked):
    return rules.spec(name, *(None for _ in stacked), *param.split)

  router = params_lib.router_tree(cfg, lambda _: P())
  return {'params': params_lib.tree(cfg, leaf), 'router': router}


def like_params(tree: Any, params: Any, specs: Any) -> Any:
  """PartitionSpecs of a tree whose leaves mirror parameters (an optimizer's state).

  A leaf gets the spec of the parameter whose path its own path ends with, if their
  shapes agree, but for axes of size 1, which are not split: numbers of each row or
  column of a matrix. All else (counts, moments of fewer axes) is replicated.

  Args:
    tree: arrays or `jax.ShapeDtypeStruct`s.
    params: the parameters, or their shapes.
    specs: their PartitionSpecs.
  """
  known = {
    _path(path): (leaf.shape, spec)
    for (path, leaf), spec in zip(
      jax.tree_util.tree_leaves_with_path(params), _leaves(specs), strict=True
    )
  }

  def one(path, leaf):
    path = _path(path)
    for start in range(len(path)):  # the longest ending first
      shape, spec = known.get(path[start:], (None, None))
      if shape == leaf.shape:
        return spec
      if shape and _reduced(leaf.shape, shape):
        pairs = zip(leaf.shape, (*spec, *(None,) * len(shape)), strict=False)
        return P(*(None if size == 1 else axes for size, axes in pairs))
    return P()

  return jax.tree_util.tree_map_with_path(one, tree)


def batch_specs(rules: Rules) -> Forest:
  """PartitionSpecs of a Forest batch. Loss terms are split as their rows."""
  token = rules.spec('batch', 'rows', 'tokens')
  term = rules.spec('loss terms', 'rows')
  return Forest(
    **dict.fromkeys(TOKEN_FIELDS, token),
    **dict.fromkeys(TERM_FIELDS, term),
  )


def _reduced(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
  """Whether `shape` is `whole` with some of its axes, not all, of size 1."""
  if len(shape) != len(whole) or all(size == 1 for size in shape):
    return False
  return all(a in (1, b) for a, b in zip(shape, whole, strict=True))


def _path(path) -> tuple[str, ...]:
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _leaves(specs):
  return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
