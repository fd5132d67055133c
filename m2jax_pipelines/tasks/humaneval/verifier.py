"""Judges code by its results alone.

1. The package's test runs with the reference solution; the arguments of each call are
   recorded as literals.
2. The candidate runs in a sandbox on those arguments; its results are literals too.
3. The test runs again, with a function that returns the candidate's results in order.

No step executes the candidate outside the sandbox, and it can reach nothing that
contains the expected results. A result that is no literal fails.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from m2jax import sandbox

MAX_CODE_CHARS = 64 << 10
# The references' results have up to 180 characters, those of a problem 2,197 bytes.
_MAX_RESULT_CHARS, _MAX_RESULTS_BYTES = 8 << 10, 64 << 10
_FENCE = re.compile(r'[ \t]*(?:```|~~~)[ \t]*([\w+.-]*)[^`]*')
_LANGUAGES = ('', 'python', 'python3', 'py')
_RUNNER = """\
import ast, json, sys
calls = json.load(open('calls.json'))
space = {'__name__': 'candidate'}
exec(compile(open('candidate.py').read(), 'candidate.py', 'exec'), space)

def plain(value):  # a Counter is equal to a dict, but its repr is no literal
  if isinstance(value, bool):
    return value
  for kind in (int, float, str):
    if isinstance(value, kind):
      return kind(value)
  if isinstance(value, dict):
    return {plain(k): plain(v) for k, v in value.items()}
  for kind in (list, tuple, set, frozenset):
    if isinstance(value, kind):
      return kind(map(plain, value))
  return value

results = []
for call in calls:
  results.append(repr(plain(space[sys.argv[1]](*ast.literal_eval(call)))))
with open('results.json', 'w') as file:
  json.dump(results, file)
"""


class _Mismatch(Exception):
  """The test calls with other arguments than recorded."""


def code_of(answer: str, name: str) -> str:
  """The code of a message: the last fenced block of Python that defines `name`.

  Without such a block, the last block of Python; without any, all of the message.
  """
  blocks, language, lines = [], None, []
  for line in answer.splitlines():
    fence = _FENCE.fullmatch(line)
    if not fence:
      lines.append(line)
    elif language is None:
      language, lines = fence[1].lower(), []
    else:
      if language in _LANGUAGES:
        blocks.append(textwrap.dedent('\n'.join(lines) + '\n'))
      language = None
  if not blocks:
    return answer
  defines = re.compile(rf'^(?:def\s+{name}\b|{name}\s*=)', re.MULTILINE)
  return next(filter(defines.search, reversed(blocks)), blocks[-1])


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
  code = code_of(answer, problem['entry_point'])
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
      results = json.loads(await box.read('results.json', _MAX_RESULTS_BYTES))
    except (FileNotFoundError, sandbox.SandboxPathError, ValueError, RecursionError):
      return False
  if not isinstance(results, list):
    return False
  if not all(isinstance(r, str) and len(r) <= _MAX_RESULT_CHARS for r in results):
    return False  # to read a longer literal would hold up the event loop
  return accepts(problem, results)
