"""The sides of a comparison: worker processes that answer commands, line by line.

A worker reads one JSON object per line from stdin and answers each with one line; an
answer with `error` gives the reason why a command failed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence


class Side:
  """A worker process on some of the cores."""

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    cores: Sequence[int],
    environment: Mapping[str, str] | None = None,
  ):
    self.name = name
    threads = dict(os.environ, OMP_NUM_THREADS=str(len(cores)))
    self.process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env={**threads, **(environment or {})},
      text=True,
      preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )

  def ask(self, do: str, **more) -> dict:
    """The answer to a command; a failed one has `error`."""
    try:
      self.process.stdin.write(json.dumps(dict(do=do, **more)) + '\n')
      self.process.stdin.flush()
      answer = self.process.stdout.readline()
    except BrokenPipeError:
      answer = ''
    if not answer:
      raise SystemExit(
        f'the process of {self.name} ended during {do!r}; its messages are above'
      )
    return json.loads(answer)

  def close(self) -> None:
    self.process.stdin.close()
    self.process.wait(timeout=60)


def cores(threads: int) -> list[int]:
  """The first cores that this process may use."""
  return sorted(os.sched_getaffinity(0))[:threads]
