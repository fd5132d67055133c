"""Starts modules of the tests as processes of their own, and reads what they say.

JAX's number of devices, its precision and its processes are fixed when it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[1]


def free_port() -> int:
  """A port that nobody has, below those that the system gives to others meanwhile."""
  path = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
  end = int(path.read_text().split()[0])
  while True:
    port = random.SystemRandom().randrange(max(1024, end - 16_000), end)
    with contextlib.suppress(OSError), socket.socket() as s:
      s.bind(('localhost', port))
      return port


def start(module: str, *args, **environment: str) -> subprocess.Popen:
  """`python -m MODULE ARGS…` on CPU, in the repository's root."""
  return subprocess.Popen(
    [sys.executable, '-m', module, *map(str, args)],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', **environment},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(
  children: Sequence[subprocess.Popen], timeout_s: float = 900
) -> list[tuple[str, str]]:
  """(standard output, standard error) of each; none is left running."""
  try:
    return [child.communicate(timeout=timeout_s) for child in children]
  finally:
    for child in children:
      child.kill()


def together(module: str, processes: int, fields: Mapping) -> list:
  """The last line, JSON, of each of several processes that meet as one JAX program.

  Each gets JSON: the fields, with `process`, `processes` and `coordinator`.
  """
  fields = {
    **fields,
    'processes': processes,
    'coordinator': f'localhost:{free_port()}',
  }
  children = [
    start(module, json.dumps({**fields, 'process': process}))
    for process in range(processes)
  ]
  ended = finish(children)
  for out, err in ended:
    assert out, err[-3000:]
  return [json.loads(out.splitlines()[-1]) for out, _ in ended]
