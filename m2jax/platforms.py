"""Dispatches on a program's target platform.

`lax.platform_dependent` traces the branches of all platforms and drops all but one when
the program is lowered. This is over half of CPU tracing time. A process that compiles
only for its own devices can declare that, and the others are not traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

# Part of the keys of jax's caches: a function traced with one value is traced again
# with the other.
_own_only = jax.make_user_context(False)


def dependent(*args: Any, default: Callable[..., Any], **branches: Any) -> Any:
  """`lax.platform_dependent`: the branch of the target platform, or `default`."""
  # Beside an accelerator a program may also be lowered for the host's CPU.
  if _own_only.value and jax.default_backend() == 'cpu':
    return branches.get('cpu', default)(*args)
  return jax.lax.platform_dependent(*args, default=default, **branches)


def own_only() -> None:
  """From here on this process lowers for its own devices, except in `any_platform`."""
  _own_only.set_global(True)


def any_platform() -> contextlib.AbstractContextManager[None]:
  """What it traces can be lowered for every platform, ahead of time."""
  return _own_only(False)
