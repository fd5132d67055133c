"""The mesh: five axes and their sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from m2jax.checks import require
from m2jax.sharding.rules import GRADIENT_DTYPES, MESH_AXES, PRESETS

_REST = -1


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the mesh axes, in devices, and which rules use them.

  Attributes:
    data, fsdp, context, expert, tensor: see `m2jax.sharding`; their product is the
      number of devices. One may be -1: all devices that the others leave.
    rules: name of a preset.
    gradient_dtype: see `Rules`.
  """

  data: int = 1
  fsdp: int = 1
  context: int = 1
  expert: int = 1
  tensor: int = 1
  rules: str = 'fsdp_ep'
  gradient_dtype: str | None = None

  def __post_init__(self):
    for name, size in self.sizes.items():
      require(self, size >= 1 or size == _REST, name, 'at least 1, or -1')
    rest = [name for name, size in self.sizes.items() if size == _REST]
    require(self, len(rest) <= 1, rest[-1] if rest else 'data', '-1 for one axis only')
    require(self, self.rules in PRESETS, 'rules', f'one of {list(PRESETS)}')
    known = self.gradient_dtype in GRADIENT_DTYPES
    require(self, known, 'gradient_dtype', f'one of {GRADIENT_DTYPES}')

  @property
  def sizes(self) -> dict[str, int]:
    """Devices along each mesh axis, in the order of the mesh."""
    return {name: getattr(self, name) for name in MESH_AXES}

  @property
  def size(self) -> int:
    """Devices; an axis of -1 counts as one."""
    return abs(math.prod(self.sizes.values()))

  def over(self, devices: int) -> MeshConfig:
    """Replaces -1 by the size that the other axes leave of `devices`, at least 1."""
    rest = {
      name: max(1, devices // self.size)
      for name, size in self.sizes.items()
      if size == _REST
    }
    return dataclasses.replace(self, **rest)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh over the first of `devices` (None: of all), neighbours along the last axes.

  On TPU its axes follow those of the torus, or parts of them.

  Raises:
    ValueError: the sizes need more devices than there are, or those are TPUs of several
      slices.
  """
  sizes = tuple(config.sizes.values())
  devices = jax.devices() if devices is None else devices
  if math.prod(sizes) > len(devices):
    used = ' × '.join(f'{name}={size}' for name, size in config.sizes.items())
    raise ValueError(
      f'mesh: {used} needs {math.prod(sizes)} devices, there are {len(devices)}; set '
      'its axes so that their product is at most that'
    )
  # TPUs have the attribute only where there are several slices.
  used = [d for d in devices[: math.prod(sizes)] if d.platform == 'tpu']
  slices = {getattr(d, 'slice_index', 0) for d in used}
  if len(slices) > 1:
    raise ValueError(
      f'mesh {config.sizes} covers {len(slices)} TPU slices: a job runs on one slice, '
      'since no axis is placed with regard to the slow links between slices. Take a '
      'larger slice, or a job for each (docs/launch.md)'
    )
  placed = mesh_utils.create_device_mesh(
    sizes, devices[: math.prod(sizes)], allow_split_physical_axes=True
  )
  # Auto: outside the model's shard_map (optimizer, metrics) the compiler shards.
  types = (AxisType.Auto,) * len(MESH_AXES)
  return Mesh(placed, MESH_AXES, axis_types=types)


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
  """The mesh without devices, to trace and lower for."""
  types = (AxisType.Auto,) * len(MESH_AXES)
  return AbstractMesh(tuple(config.sizes.values()), MESH_AXES, axis_types=types)
