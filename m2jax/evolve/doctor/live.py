"""Examines a run while its job runs, in a thread of the job that cannot stop it.

The thread reads what is cheap (`examine(cheap=True)`), at most every `EVERY_S`, and
sleeps `REST` times as long as it worked: it uses 2 % of one processor at most. An error
ends it, and is logged. When the job is complete, one whole examination follows.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from m2jax.evolve import doctor
from m2jax.observe import findings

EVERY_S = 60.0
REST = 50.0
_JOIN_S = 10.0  # an examination that takes longer is left to end with the process


@contextlib.contextmanager
def watching(
  workdir: pathlib.Path,
  show: Callable[[Sequence[findings.Shown]], None],
  *,
  pool_url: str = '',
  every_s: float = EVERY_S,
) -> Iterator[None]:
  """Examines WORKDIR while the body runs; each time all findings go to `show`.

  They are also in WORKDIR/findings.json, for the report and the trajectory page.
  """
  ended = threading.Event()

  def look(cheap: bool) -> None:
    found = doctor.examine(workdir, pool_url=pool_url, cheap=cheap)
    values = [x.as_dict() for x in found]
    if not ended.is_set() or not cheap:
      findings.write(workdir, values)
      show(findings.parse(values))

  def watch() -> None:
    wait_s = every_s
    while not ended.wait(wait_s):
      started_s = time.monotonic()
      if not _tried(look, True):
        return
      wait_s = max(every_s, REST * (time.monotonic() - started_s))

  thread = threading.Thread(target=watch, name='doctor', daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join(_JOIN_S)
  _tried(look, False)


def _tried(look: Callable[[bool], None], cheap: bool) -> bool:
  """Whether an examination succeeded; the reason is logged if it did not."""
  try:
    look(cheap)
    return True
  except Exception:  # whatever is wrong with it, the job continues
    logging.exception('the run doctor failed; the run continues without it')
    return False
