"""Stage 5, statements: written by a script or a model, then checked against the task.

A scripted statement says what the failing tests check; how much it reveals is drawn, as
in SWE-smith. A model's statement is used only if it names what the task is about and
quotes no line of the solution.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence

from m2jax_pipelines.swe.drafts import test_file
from m2jax_pipelines.swe.environment import Environment
from m2jax_pipelines.swe.mutate import Mutation

_SHOWN_LINES = 24
_RULES = """\
The package is in this directory. Change its sources only: tests, their configuration
and added modules are not part of what is judged.
"""


def bug(
  env: Environment, found: Sequence[Mutation], f2p: Sequence[str], rng: random.Random
) -> str:
  """The issue of one or several injected bugs."""
  name, modules = env.source.name, sorted({m.path for m in found})
  lines = [f'# {name}: wrong results\n']
  level = rng.choice(('behaviour', 'module', 'function'))
  if level == 'module':
    lines.append(f'Something in `{"`, `".join(modules)}` does not work any more.\n')
  elif level == 'function':
    functions = sorted({m.function for m in found})
    lines.append(f'`{"`, `".join(functions)}` does not work as documented any more.\n')
  else:
    lines.append(f'A part of {name} does not work any more.\n')
  shown = excerpt(env, rng.choice(sorted(f2p)))
  if shown:
    lines.append(f'For example, this fails:\n\n```python\n{shown}\n```\n')
  lines.append(f'{len(f2p)} checks of its behaviour fail.\n')
  return '\n'.join([*lines, _rules(env)])


def write_test(env: Environment, mutation: Mutation, target: str) -> str:
  """The statement of a SWE-Test task."""
  return (
    f'# {env.source.name}: a test for a bug\n\n'
    f'`{mutation.function}` in `{mutation.path}` has a bug: some results are wrong. '
    f'Write `{target}`: tests for pytest that fail because of the bug and pass when '
    'it is repaired. Do not look at the text of the sources in them, nor at files. '
    'The sources need not be changed.\n'
  )


def review(env: Environment) -> str:
  """The statement of a review."""
  return (
    f'# Review a change of {env.source.name}\n\n'
    '`change.diff` is a proposed change; the directory has the sources after it. It '
    'is said to change no behaviour, but one line of it does, and is wrong. Write '
    '`review.json`: `{"path": "file", "line": number}`, the line in the changed file.\n'
  )


def release(env: Environment, before: str, notes: str, feature: bool) -> str:
  """The statement of a real change between two releases."""
  kind = 'new behaviour' if feature else 'a repair'
  text = f'# {env.source.name}: {kind} after {before}\n\n'
  if notes:
    text += f'From the notes of the release that has it:\n\n{notes}\n\n'
  else:
    text += 'The release notes say nothing of it; the tests of the package do.\n\n'
  return text + _rules(env)


def _rules(env: Environment) -> str:
  runs = f'`{env.pytest}` runs the tests that are here; others decide.\n'
  return _RULES + (runs if env.pytest else 'Tests that are not here decide.\n')


def acceptable(text: str, env: Environment, solution: str, shown: str) -> bool:
  """Whether a model's statement is about this package, names something that the check
  `shown` calls, and gives nothing away."""
  if not 80 <= len(text) <= 6000 or env.source.name.lower() not in text.lower():
    return False
  called = set(re.findall(r'(?<!def )\b(?!assert|raises|parametrize)(\w+)\(', shown))
  if called and not called & set(re.findall(r'\w+', text)):
    return False
  added = [
    line[1:].strip()
    for line in solution.splitlines()
    if line.startswith('+') and not line.startswith('+++')
  ]
  return not any(len(line) > 12 and line in text for line in added)


def request(env: Environment, diff: str, shown: str) -> list[dict[str, str]]:
  """The chat that asks a model for a statement."""
  return [
    {
      'role': 'system',
      'content': 'You write issue reports. Describe the symptom as a user sees it, '
      'with an example. Never describe or quote the repair.',
    },
    {
      'role': 'user',
      'content': f'Package {env.source.name}. The repair:\n{diff}\n'
      f'A check that fails without it:\n{shown}\nWrite the issue.',
    },
  ]


def excerpt(env: Environment, test: str) -> str:
  """Source of a test function, without its decorators; '' if it is not found."""
  names = re.sub(r'\[.*', '', test).split('::')[1:]
  data = env.source.files.get(test_file(test), b'')
  try:
    node: ast.AST = ast.parse(data)
  except (SyntaxError, ValueError):
    return ''
  for name in names:
    node = next((n for n in ast.walk(node) if getattr(n, 'name', None) == name), None)
    if node is None:
      return ''
  lines = data.decode().splitlines()[node.lineno - 1 : node.end_lineno]
  if len(lines) > _SHOWN_LINES:
    lines = [*lines[:_SHOWN_LINES], '    ...']
  indent = min((len(l) - len(l.lstrip()) for l in lines if l.strip()), default=0)
  return '\n'.join(line[indent:] for line in lines)


def notes(old: bytes, new: bytes) -> str:
  """Lines that a changelog gained."""
  before = set(old.decode(errors='replace').splitlines())
  added = [
    line for line in new.decode(errors='replace').splitlines() if line not in before
  ]
  return '\n'.join(added[:30]).strip()
