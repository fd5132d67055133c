"""Sizes of the kernels' blocks: one file per device kind, checked in.

A kernel gets the sizes of its platform: of the local device's kind if it has a file,
otherwise, as in ahead-of-time compilation for an absent device, of the platform's first
file. Sizes change speed, and results only by the order of sums.
`benchmarks/kernels.py --tune` measures candidates on a device.
"""

from __future__ import annotations

import contextlib

import jax

from m2jax.kernels.block_sizes import nvidia_h100, tpu_v5p

# by platform: what `device_kind` starts with, and the sizes; the first is the default
_FILES = {
  'tpu': [('TPU v5', tpu_v5p.SIZES)],
  'gpu': [('NVIDIA H', nvidia_h100.SIZES)],
}

# (platform, op, sizes) of those in force. Part of the keys of jax's caches: what was
# traced with other sizes is traced again.
_replaced = jax.make_user_context(())


def get(platform: str, op: str) -> dict[str, int]:
  """The sizes of `op` on `platform` ('tpu' or 'gpu'): names as in the files."""
  sizes = dict(_file(platform)[op])
  for *of, replaced in _replaced.value:
    if of == [platform, op]:
      sizes.update(replaced)
  return sizes


def replaced(
  platform: str, op: str, **sizes: int
) -> contextlib.AbstractContextManager[None]:
  """A context in which `get` returns these sizes."""
  return _replaced((*_replaced.value, (platform, op, tuple(sizes.items()))))


def _file(platform):
  files = _FILES[platform]
  if jax.default_backend() == platform:
    kind = jax.devices()[0].device_kind
    files = [file for file in files if kind.startswith(file[0])] or files
  return files[0][1]
