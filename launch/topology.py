"""A slice of TPU v5p: shape → chips, hosts, TensorCores and names in other tools.

Source: xpk 1.16.0, core/system_characteristics.py (supported shapes, TensorCores per
chip, chips per host, GKE's name). `v5p:4x4x4` is a shape in chips; `v5p-8` counts
TensorCores: 4 chips, one host. A count means the shape closest to a cube, as in xpk, up
to v5p-12288; larger slices need a shape.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

GENERATION = 'v5p'
GKE_ACCELERATOR = 'tpu-v5p-slice'
CHIPS_PER_HOST = 4
CORES_PER_CHIP = 2

_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # below one cube of 4x4x4
_CUBES = 140  # of 4x4x4 in the largest slice
_LONGEST = 256
_MAX_NAMED = 12288  # TensorCores


@dataclasses.dataclass(frozen=True)
class Slice:
  """One slice, such as Slice((4, 4, 4)).

  Raises:
    ValueError: v5p has no such shape.
  """

  shape: tuple[int, int, int]

  def __post_init__(self):
    if not _supported(self.shape):
      raise ValueError(
        f'v5p has no slice of {self.topology}: use 2x2x1, 2x2x2, 2x2x4, 2x4x4, or '
        f'three multiples of 4, smallest first, of at most {_CUBES} cubes of 4x4x4'
      )

  @property
  def topology(self) -> str:
    """The shape in chips, such as 4x4x4."""
    return 'x'.join(map(str, self.shape))

  @property
  def chips(self) -> int:
    """Number of chips."""
    return math.prod(self.shape)

  @property
  def hosts(self) -> int:
    """Number of virtual machines, and of JAX processes of a program."""
    return self.chips // CHIPS_PER_HOST

  @property
  def accelerator_type(self) -> str:
    """The name with the number of TensorCores, such as v5p-128.

    Raises:
      ValueError: the name means another shape with the same number of chips.
    """
    name = f'{GENERATION}-{self.chips * CORES_PER_CHIP}'
    if (usual := _usual_shape(self.chips)) != self.shape:
      means = 'x'.join(map(str, usual)) if usual else 'no single shape'
      raise ValueError(
        f'{name} means {means}, not {self.topology}: use another shape, or a target '
        'that accepts a shape (xpk, jobset)'
      )
    return name

  def __str__(self) -> str:
    return f'{GENERATION}:{self.topology}'


def parse(text: str) -> Slice:
  """A slice from 'v5p:4x4x4' (chips) or 'v5p-128' (TensorCores).

  Raises:
    ValueError: it is neither, or there is no such slice.
  """
  if match := re.fullmatch(GENERATION + r':(\d+)x(\d+)x(\d+)', text):
    return Slice(tuple(map(int, match.groups())))
  match = re.fullmatch(GENERATION + r'-(\d+)', text)
  if not match:
    raise ValueError(
      f'topology {text!r}: must be v5p:AxBxC in chips, such as v5p:4x4x4, or '
      'v5p-CORES, such as v5p-128; other generations are not supported'
    )
  chips, odd = divmod(int(match[1]), CORES_PER_CHIP)
  if odd or (shape := _usual_shape(chips)) is None:
    raise ValueError(f'no slice is called {text}: use its shape in chips')
  return Slice(shape)


def _supported(shape: tuple[int, ...]) -> bool:
  cubes = all(4 <= side <= _LONGEST and side % 4 == 0 for side in shape)
  small_enough = math.prod(shape) <= _CUBES * 64
  return shape in _SMALL or (cubes and tuple(sorted(shape)) == shape and small_enough)


def _usual_shape(chips: int) -> tuple[int, int, int] | None:
  """The shape that a number of chips means."""
  if chips * CORES_PER_CHIP > _MAX_NAMED:
    return None
  sides = [side for side in range(4, _LONGEST + 1, 4) if chips % side == 0]
  pairs = itertools.combinations_with_replacement(sides, 2)
  shapes = [s for s in _SMALL if math.prod(s) == chips]
  shapes += [(a, b, chips // (a * b)) for a, b in pairs if chips % (a * b) == 0]
  return min(filter(_supported, shapes), key=sum, default=None)
