"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
  """Returns as soon as `condition()` holds; fails after `timeout_s`, a last resort."""
  ends_s = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < ends_s, f'not within {timeout_s:g} s'
    time.sleep(0.005)
