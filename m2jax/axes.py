"""Types of arrays by dtype and axes: `Float[Array, 'B S D']`.

Public array functions have such hints. The tests check them at every call
(tests/conftest.py): within a call an axis has one size. No other run evaluates them.

Axes: B rows, S tokens in a row, T flat tokens, D model, N query heads, K key/value
heads, G = N/K, H head dim, E experts, F expert hidden, V vocabulary, L layers, M loss
terms; MTP modules are `mtp`. A module's docstring names the axes that it adds. `*M` is
any number of axes.

The fields of records have hints for the reader only: jax also builds records of
placement specs and placeholders.
"""

from __future__ import annotations

import typing

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32, Shaped, UInt32

Array = jax.Array | np.ndarray
_Kind = typing.TypeVar('_Kind', bound=type)


def unchecked(kind: _Kind) -> _Kind:
  """A record whose hints no run checks; type checkers read them."""
  return typing.no_type_check(kind)


__all__ = (
  'Array',
  'Bool',
  'Float',
  'Float32',
  'Int',
  'Int32',
  'Shaped',
  'UInt32',
  'unchecked',
)
