"""Time that jax spends compiling, which training budgets do not count."""

from __future__ import annotations

import threading

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'  # also sent on a cache hit
_spent = threading.local()


def seconds() -> float:
  """Seconds that the calling thread has compiled since this module was imported."""
  return getattr(_spent, 'seconds', 0.0)


def _listen(event: str, duration_s: float, **_) -> None:
  if event == _EVENT:  # called by the thread that compiled
    _spent.seconds = seconds() + duration_s


jax.monitoring.register_event_duration_secs_listener(_listen)
