"""Judges code by its results alone.

1. The package's test runs with the reference solution; the arguments of each call are
   recorded as literals.
2. The candidate runs in a sandbox on those arguments; its results are literals too.
3. The test runs again, with a function that returns the candidate's results in order.

No step executes the candidate outside the sandbox, and nothing that it can reach knows
what is expected. A result that is no literal fails.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from m2jax import sandbox

MAX_CODE_CHARS = 64 << 10
_MAX_RESULT_BYTES = 4 << 20
_BLOCK = re.compile(r'```(?:python|py)?[ \t]*\n(.*?)```', re.DOTALL)
_RUNNER = """\
import ast, json, sys
calls = json.load(open('calls.json'))
space = {'__name__': 'candidate'}
exec(compile(open('candidate.py').read(), 'candidate.py', 'exec'), space)
results = []
for call in calls:
  results.append(repr(space[sys.argv[1]](*ast.literal_eval(call))))
with open('results.json', 'w') as file:
  json.dump(results, file)
"""


class _Mismatch(Exception):
  """The test calls with other arguments than recorded."""


def code_of(answer: str) -> str:
  """The code of a message: its last fenced block, or all of it without one."""
  blocks = _BLOCK.findall(answer)
  return blocks[-1] if blocks else answer


def host() -> sandbox.Host:
  """Sandboxes with this process's interpreter."""
  return sandbox.Host(read_only=((sys.base_prefix, sys.base_prefix),))


def calls(problem: Mapping[str, str]) -> list[str]:
  """Arguments of the test's calls, as literals."""
  recorded = []
  reference = _definitions(problem)[problem['entry_point']]

  def record(*arguments):
    recorded.append(repr(arguments))
    return reference(*arguments)

  _check(problem, record)
  return recorded


def accepts(problem: Mapping[str, str], results: Sequence[Any]) -> bool:
  """Whether the package's test passes with these results of its calls, in order.

  Args:
    results: texts of literals.
  """
  left, expected = list(results), calls(problem)
  if len(left) != len(expected):
    return False

  def replay(*arguments):
    if not left or repr(arguments) != expected[len(expected) - len(left)]:
      raise _Mismatch
    return ast.literal_eval(left.pop(0))

  try:
    _check(problem, replay)
  except Exception:  # the test failed, or a result is no literal
    return False
  return not left


def _definitions(problem: Mapping[str, str]) -> dict[str, Any]:
  space: dict[str, Any] = {}
  exec(problem['prompt'] + problem['canonical_solution'], space)
  return space


def _check(problem: Mapping[str, str], candidate: Callable) -> None:
  """Runs the package's test; its random arguments are the same each time."""
  space = _definitions(problem)
  exec(problem['test'], space)
  state = random.getstate()
  random.seed(0)
  try:
    space['check'](candidate)
  finally:
    random.setstate(state)


async def verify(
  problem: Mapping[str, str], answer: str, backend: str, limits: sandbox.Limits
) -> bool:
  """Whether the code of an answer solves the problem.

  Raises:
    SandboxError, OSError: the sandbox failed.
  """
  code = code_of(answer)
  if len(code) > MAX_CODE_CHARS:
    return False
  files = {
    'candidate.py': code.encode(errors='replace'),
    'runner.py': _RUNNER.encode(),
    'calls.json': json.dumps(calls(problem)).encode(),
  }
  opened = sandbox.create(contents=files, backend=backend, limits=limits, host=host())
  async with await opened as box:
    python = f'{sys.base_prefix}/bin/python3'
    ran = await box.exec(f'{python} -I runner.py {problem["entry_point"]}')
    if ran.returncode:
      return False
    try:
      results = json.loads(await box.read('results.json', _MAX_RESULT_BYTES))
    except (FileNotFoundError, sandbox.SandboxPathError, ValueError, RecursionError):
      return False
  if not isinstance(results, list) or not all(isinstance(r, str) for r in results):
    return False
  return accepts(problem, results)
