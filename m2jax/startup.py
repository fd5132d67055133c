"""What a process sets up before it uses jax: vectors, devices and memory of a CPU.

  startup.prepare(startup.devices())  # before jax is used

Every job that trains or serves calls it (`experiments.common.start`). On a GPU or a TPU
it sets nothing. On a CPU four defaults make a small model slow:

- XLA computes in 256-bit vectors where the processor has wider ones.
- XLA runs much of a device's program on one thread. A virtual device per core, and a
  mesh over them, use all cores.
- glibc takes the temporaries of each call from the kernel and gives them back, so that
  every step clears the same pages again: `python -m benchmarks.prefix_tree --workloads
  "verl B" --kinds a f --clock cpu`, with `--no-keep_memory` and without. Freed memory
  stays with the process instead.
- Memory comes in pages of 4 KiB. Its heap is set to take huge ones where the kernel
  offers them.

mallopt(3) and madvise(2) describe the settings of memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1
_HUGE = 2 << 20
_VECTORS = '--xla_cpu_prefer_vector_width=512'
_DEVICES = 'xla_force_host_platform_device_count'
_ACCELERATORS = 'libtpu', 'jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin'


def devices() -> int:
  """Into how many a CPU is best divided: the cores of this process, as a power of two,
  which divides the experts of a model, and at most 8."""
  cores = len(os.sched_getaffinity(0))
  return min(8, 1 << (cores.bit_length() - 1))


def on_cpu() -> bool:
  """Whether jax will run on the CPU: JAX_PLATFORMS says so, or no accelerator's package
  is installed. Does not start jax's backend."""
  import jax

  chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
  return chosen == 'cpu' or not (chosen or any(map(_installed, _ACCELERATORS)))


def _installed(package: str) -> bool:
  return importlib.util.find_spec(package) is not None


def prepare(devices: int | None = None) -> None:
  """Sets up the process for jax on a CPU; elsewhere does nothing.

  Call it before jax starts its threads: memory of threads that already have an arena of
  their own is not affected. XLA_FLAGS and JAX_NUM_CPU_DEVICES take precedence.

  Args:
    devices: number of devices to divide the CPU into; None leaves one.
  """
  import jax

  if not on_cpu():
    return
  keep_freed()
  flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'{_VECTORS} {flags}'.strip()  # the last one takes effect
  given = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
  if devices and _DEVICES not in flags and given < 0:
    jax.config.update('jax_num_cpu_devices', devices)


def keep_freed() -> bool:
  """From now on freed memory stays with the process, which grows to its largest need.

  The first half of the machine's memory comes in huge pages, if the kernel gives them.

  Returns:
    Whether the C library is glibc, which has the settings.
  """
  try:
    libc = ctypes.CDLL(None)
    mallopt = libc.mallopt
  except (OSError, AttributeError):
    return False
  settings = {_M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: _NEVER, _M_MMAP_MAX: 0}
  kept = all(mallopt(name, value) for name, value in settings.items())
  if kept:
    _huge_pages(libc, os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2)
  return kept


def _huge_pages(libc: ctypes.CDLL, size: int) -> None:
  """Advises the kernel to back the next `size` bytes of the heap with huge pages.

  Allocated and freed untouched, they stay at the top of the heap, from which later
  allocations are cut; until then they take no memory.
  """
  libc.malloc.restype = ctypes.c_void_p
  start = libc.malloc(ctypes.c_size_t(size))
  if not start:
    return
  first = -(-start // _HUGE) * _HUGE
  length = (start + size - first) // _HUGE * _HUGE
  libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
  libc.free(ctypes.c_void_p(start))
