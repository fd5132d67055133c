"""Runs the function of an untrusted file in a sandbox; only its values come back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from m2jax import sandbox

FILE = 'f.py'
MAX_BYTES = 4096
_RUNNER = """\
import json, sys
space = {}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'), space)
print(json.dumps([space['f'](*call) for call in json.loads(sys.argv[2])]))
"""
Values = list  # of whatever JSON the function's values are


async def values(
  box: sandbox.Sandbox, calls: Sequence[tuple[int, int]]
) -> Values | str:
  """Values of `f` on the calls, in order; or the last line of its error.

  The expected values are not in the sandbox: code can only compute them.
  """
  arguments = shlex.join([_RUNNER, FILE, json.dumps(list(calls))])
  ran = await box.exec(f'python3 -I -S -c {arguments}')
  if ran.timed_out or ran.oom:
    return 'killed: out of ' + ('time' if ran.timed_out else 'memory')
  if ran.returncode:
    return (ran.stderr.strip() or f'exit {ran.returncode}').splitlines()[-1]
  try:
    found = json.loads(ran.stdout)
  except (ValueError, RecursionError):
    return 'f.py must not print'
  return found if isinstance(found, list) and len(found) == len(calls) else 'no values'


def equal(found: Values | str, expected: Sequence[int]) -> bool:
  """Whether the values are these integers: 1.0 and true are not 1."""
  return [repr(v) for v in found] == [repr(v) for v in expected]
