"""A slice for tests that need chips' places and no compiler."""

from __future__ import annotations

import dataclasses
import itertools

from m2jax.plan import chips, topology


@dataclasses.dataclass(frozen=True)
class Device:
  """What a mesh and the links need to know of a TPU."""

  id: int
  coords: tuple[int, ...]
  device_kind: str = 'TPU v5'
  platform: str = 'tpu'
  core_on_chip: int = 0
  process_index: int = 0


@dataclasses.dataclass(frozen=True)
class SliceDevice(Device):
  """A device of one of several slices; others have no such attribute."""

  slice_index: int = 0


def slice_(*shape: int, hbm_bytes: float | None = None) -> topology.Topology:
  """A v5p slice of this shape."""
  (chip,) = (c for c in chips.CHIPS if c.name == 'v5p')
  if hbm_bytes is not None:
    chip = dataclasses.replace(chip, hbm_bytes=hbm_bytes)
  points = itertools.product(*(range(side) for side in reversed(shape)))
  devices = tuple(Device(i, p[::-1]) for i, p in enumerate(points))
  name = 'v5p:' + 'x'.join(map(str, shape))
  return topology.Topology(name, chip, devices, shape)
