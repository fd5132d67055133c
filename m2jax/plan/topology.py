"""The devices of a TPU slice, to compile for with libtpu and without a TPU.

libtpu compiles on any machine; it needs a TPU neither to compile nor to report memory
(facts/jax-anchors.md §0.1).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import os
import re

import jax
from jax.experimental import topologies

from m2jax.plan import chips

# Without a TPU libtpu must neither query the cloud's metadata server nor take the lock
# that restricts a real TPU to one process.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5p-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices of a slice.

  Attributes:
    name: 'v5p:8x8x8', in chips.
    chip: their kind.
    devices: all of them.
    shape: chips along each axis of the torus.
  """

  name: str
  chip: chips.Chip
  devices: tuple[jax.Device, ...]
  shape: tuple[int, ...]


def check_version(version: str) -> None:
  """Raises ValueError if jax's extra `tpu` pins libtpu to other versions than this.

  Another version compiles too, but may crash while the program's text is read.
  """
  for needed in importlib.metadata.requires('jax') or ():
    pin = re.match(r'libtpu==([\d.*]+)', needed)
    if pin and not fnmatch.fnmatchcase(version, pin[1]):
      raise ValueError(
        f'libtpu {version} is not the one that jax {jax.__version__} is made for: '
        f"pip install 'libtpu=={pin[1]}'"
      )


def load(name: str) -> Topology:
  """The slice `name`: generation and shape in chips, such as 'v5p:8x8x8'.

  Raises:
    ValueError: libtpu is missing, of another version than jax needs, or does not
      support the slice.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError(
      "compiling for a TPU needs libtpu (no TPU is needed): pip install -e '.[tpu]'"
    )
  check_version(importlib.metadata.version('libtpu'))
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  try:
    devices = topologies.get_topology_desc(platform='tpu', topology_name=name).devices
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0]
    known = ', '.join(chip.name for chip in chips.CHIPS)
    raise ValueError(
      f'topology {name!r}: {reason}; want GENERATION:AxBxC in chips, such as '
      f'v5p:8x8x8 or v6e:16x16, the generation one of {known}'
    ) from error
  chip = chips.of_kind(devices[0].device_kind)
  shape = tuple(max(c) + 1 for c in zip(*(d.coords for d in devices), strict=True))
  return Topology(name, chip, tuple(devices), shape)
