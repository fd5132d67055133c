"""Which keys each query sees: the mask of forest attention as a few vectors (law 1).

Axes: B rows, Q queries, S keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Int32, unchecked


def _static(default):
  return dataclasses.field(default=default, metadata={'static': True})


@unchecked  # jax also fills it with specs and placeholders
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
  """Key j is seen by query i iff `j <= q_index[i] < subtree_end[j]`.

  Attributes:
    subtree_end: 0 hides a key.
    q_index: index of each query in the row; None: 0 … Q-1, Q = S.
    window: a query also needs `q_position - k_position < window`, except for keys of
      position below `sinks`; None: no window.
    sinks: see there.
    q_position, k_position: needed by `window`.
    pairs: block pairs of the TPU kernels, from `prepare`; None: `attend` makes them.

  Example, of two causal rows of which the second has one token of padding:
    >>> seen = Visibility(jnp.array([[3, 3, 3], [2, 2, 0]]))
  """

  subtree_end: Int32[Array, 'B S']
  q_index: Int32[Array, 'B Q'] | None = None
  window: int | None = _static(None)
  sinks: int = _static(0)
  q_position: Int32[Array, 'B Q'] | None = None
  k_position: Int32[Array, 'B S'] | None = None
  pairs: Any = None

  def complete(self, queries: int) -> Visibility:
    """Adds an index for each of `queries` queries, and drops unused positions.

    Raises:
      ValueError: a window without positions.
    """
    if self.window is None:
      out = dataclasses.replace(self, sinks=0, q_position=None, k_position=None)
    elif self.q_position is None or self.k_position is None:
      raise ValueError('Visibility.window needs q_position and k_position')
    else:
      out = self
    if self.q_index is not None:
      return out
    index = jnp.arange(queries, dtype=jnp.int32)
    index = jnp.broadcast_to(index, (len(self.subtree_end), queries))
    return dataclasses.replace(out, q_index=index)

  def map(
    self, of_queries: Callable[[Any, int], Any], of_keys: Callable[[Any, int], Any]
  ) -> Visibility:
    """Applies `of_queries` or `of_keys` to each array; drops `pairs`.

    Args:
      of_queries, of_keys: functions of an array [B, Q] or [B, S] and of the value that
        pads it, with which a query sees nothing and a key is not seen.
    """
    windowed = self.window is not None
    return dataclasses.replace(
      self,
      subtree_end=of_keys(self.subtree_end, 0),
      q_index=of_queries(self.q_index, -1),
      q_position=of_queries(self.q_position, 0) if windowed else None,
      k_position=of_keys(self.k_position, 0) if windowed else None,
      pairs=None,
    )
