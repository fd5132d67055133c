"""The implementation of the platform that a program is lowered for.

`lax.platform_dependent` traces the branches of all platforms and drops all but one when
the program is lowered. Of tracing a model for a CPU that is more than half. A process
that compiles for its own devices only can say so, and the others are not traced.
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
  """`lax.platform_dependent`: the branch of the platform lowered for, or `default`."""
  # Beside an accelerator a program may also be lowered for the host's CPU.
  if _own_only.value and jax.default_backend() == 'cpu':
    return branches.get('cpu', default)(*args)
  return jax.lax.platform_dependent(*args, default=default, **branches)


def own_only() -> None:
  """From here on this process lowers for its own devices, except in `any_platform`."""
  _own_only.set_global(True)


def any_platform() -> contextlib.AbstractContextManager[None]:
  """What is traced in it can be lowered for every platform, ahead of time."""
  return _own_only(False)
