"""Connects the processes of a job.

`jax.distributed.initialize`, without the persistent compilation cache on CPU: a program
that XLA's CPU backend loads from the cache has lost the order of its collectives, and
two processes exchange different arrays (seen with jaxlib 0.10.2; gloo then aborts with
"Received data size doesn't match expected size").
"""

from __future__ import annotations

import jax


def join(
  coordinator: str | None = None,
  count: int | None = None,
  process: int | None = None,
  **settings,
) -> None:
  """Connects this process to the others; before the first use of a device.

  Args:
    coordinator: HOST:PORT of process 0. None, like the next two, is what JAX finds in
      the environment.
    count: number of processes.
    process: index of this one.
    **settings: further arguments of `jax.distributed.initialize`.

  Raises:
    ValueError: an argument is None and JAX does not find it.
  """
  jax.distributed.initialize(coordinator, count, process, **settings)
  if jax.default_backend() == 'cpu':
    jax.config.update('jax_enable_compilation_cache', False)
