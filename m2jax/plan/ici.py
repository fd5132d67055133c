"""Least time of a collective on the links of a TPU slice.

A slice is a grid of chips, each linked to its neighbours along every axis; an axis is a
ring where it spans a whole side that wraps around, else a line. The devices of a group
span some axes, or parts of them. With one-way link bandwidth W (scaling book, chapter
3), on V bytes:

  all-gather         (n - 1)/n · V over the sum of the axes' bandwidths, 2·W for a ring
                     and W for a line, whose ends receive from one side only
  reduce-scatter     the same
  all-reduce         twice that
  all-to-all         bytes across the middle of every axis of e chips: V·e / (8·W) on a
                     ring, V·e / (4·W) on a line; the slowest axis
  permute            V / W

Devices that are not neighbours share their links with the groups between them. Two
devices of one chip are taken to communicate at the speed of all its links, which never
bounds a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2jax.plan.chips import Chip

Coords = tuple[int, ...]


def axes(
  coords: Sequence[Coords], shape: Sequence[int], chip: Chip
) -> list[tuple[int, float]]:
  """(chips, bandwidth in bytes/s) of each axis that a group's chips span.

  Args:
    coords: the coordinates of the group's chips.
    shape: the slice's shape, in chips.
  """
  spanned = []
  for axis, side in enumerate(shape):
    at = sorted({c[axis] for c in coords})
    if len(at) < 2:
      continue
    stride = min(b - a for a, b in zip(at, at[1:], strict=False))
    ring = len(at) * stride == side and side % chip.torus_from == 0
    bandwidth = chip.link_bandwidth * (2 if ring else 1) / stride
    spanned.append((len(at), bandwidth))
  return spanned


def seconds(
  kind: str,
  size_bytes: float,
  coords: Sequence[Coords],
  shape: Sequence[int],
  chip: Chip,
) -> float:
  """Time of one collective of `size_bytes` (see `collectives.Collective.bytes`)."""
  spanned = axes(coords, shape, chip)
  if not spanned:  # devices of one chip
    return size_bytes / (2 * len(shape) * chip.link_bandwidth)
  if kind == 'collective-permute':
    return size_bytes / chip.link_bandwidth
  if kind.endswith('all-to-all'):
    return max(n * size_bytes / (4 * bandwidth) for n, bandwidth in spanned)
  n = len(coords)
  share = (n - 1) / n
  once = share * size_bytes / sum(bandwidth for _, bandwidth in spanned)
  return 2 * once if kind == 'all-reduce' else once
