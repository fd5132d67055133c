"""TPU chips as JAX devices: peak FLOP/s, memory and bandwidths.

Peaks, HBM size and HBM bandwidth are those of JAX's own table (jax._src.tpu_info, jax
0.12; facts/jax-anchors.md §2.3 uses its peaks); v5p's 95 GiB of HBM is what Cloud TPU
documents. Link bandwidth is the one-way figure of the scaling book (jax-ml,
chapter 2), a tenth below what docs.cloud.google.com/tpu/docs gives as bidirectional
ICI bandwidth of a chip divided by its ports and by two.

Devices are JAX's: a v5p chip is one device, a tpu7x chip is two.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of device.

  Attributes:
    name: its name in a topology, 'v5p'.
    device_kind: JAX's name for it.
    peak_flops: bf16 FLOP/s.
    hbm_bytes: capacity.
    hbm_bandwidth: bytes/s.
    link_bandwidth: bytes/s of one link in one direction.
    mxu: side of the matrix unit, to a multiple of which matmuls are padded.
    torus_from: a side of a slice that is a multiple of this is a ring, else a line.
    devices: devices per chip.
  """

  name: str
  device_kind: str
  peak_flops: float
  hbm_bytes: float
  hbm_bandwidth: float
  link_bandwidth: float
  mxu: int
  torus_from: int
  devices: int = 1


CHIPS = (
  Chip('v4', 'TPU v4', 2.75e14, 32 * GIB, 1.23e12, 4.5e10, 128, 4),
  Chip('v5e', 'TPU v5 lite', 1.97e14, 16 * GIB, 8.2e11, 4.5e10, 128, 16),
  Chip('v5p', 'TPU v5', 4.59e14, 95 * GIB, 2.46e12, 9e10, 128, 4),
  Chip('v6e', 'TPU v6 lite', 9.2e14, 32 * GIB, 1.64e12, 9e10, 256, 16),
  Chip('tpu7x', 'TPU7x', 1.155e15, 96 * GIB, 3.7e12, 9e10, 256, 4, devices=2),
)


def of_kind(device_kind: str) -> Chip:
  """The chip with this `device_kind`.

  Raises:
    ValueError: it is not in the table.
  """
  for chip in CHIPS:
    if chip.device_kind == device_kind:
      return chip
  known = ', '.join(chip.name for chip in CHIPS)
  raise ValueError(
    f'no figures for devices of kind {device_kind!r}: m2jax/plan/chips.py has {known}'
  )
