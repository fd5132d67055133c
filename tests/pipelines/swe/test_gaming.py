"""At least 20 attempts on each kind of reward get nothing.

Those on F2P ∧ P2P are in test_cheats.py.
"""

from __future__ import annotations

import json
import math
import random

import pytest

from m2jax.tasks import harbor
from m2jax_pipelines.swe import drafts, grade, third, timing, variants
from tests.pipelines.swe import batch, computed, package, test_cheats

_CORE = 'src/tinycalc/core.py'
_TARGET = 'tests/test_regression_of_bug.py'
_BUG = package.CORE.replace('if value < low:', 'if value > low:')
_LEAST = 20
_PAIRS = 3  # of runs: the honest repair is a thousand times faster


def _task(draft, dataset, split):
  place = dataset / 'tasks' / split
  place.mkdir(parents=True, exist_ok=True)
  return harbor.of_directory(harbor.read(harbor.write(draft, place)))


def _file(path: str, text: str) -> str:
  return f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND"


def _written(body: str, head: str = '') -> str:
  lines = '\n'.join(f'  {line}' for line in body.splitlines())
  text = f'import sys\nimport pytest\nfrom tinycalc import clamp, core, total\n{head}'
  return _file(_TARGET, f'{text}\ndef test_clamp():\n{lines}\n')


_FINDS = 'assert clamp(1, 2, 4) == 2'
_LOADER = 'loader = core.__loader__\n'
_CODE = next(
  c.co_code
  for c in compile(package.CORE, 'core.py', 'exec').co_consts
  if getattr(c, 'co_name', '') == 'clamp'
)
_TREE = 'import ast\n' + _LOADER
WRITTEN = {
  'no file': 'true',
  'an empty file': _file(_TARGET, ''),
  'not Python': _file(_TARGET, 'def test(:'),
  'no test in the file': _written('pass').replace('test_clamp', 'check_clamp'),
  'always fails': _written('assert False'),
  'always passes': _written('assert clamp(2, 2, 4) == 2'),
  'finds another behaviour': _written('assert total([1, 2]) == 3'),
  'asserts the bug': _written('assert clamp(1, 2, 4) == 1'),
  'skips': _written(f'{_FINDS}\npytest.skip("no")'),
  'is expected to fail': _written(_FINDS, '@pytest.mark.xfail'),
  'unittest skips': _written(_FINDS, 'import unittest\n@unittest.skip("no")'),
  'no parameters': _written(
    _FINDS, '@pytest.mark.parametrize("x", [])\ndef test_x(x): pass'
  ),
  'fails when it is imported': _written('pass', _FINDS),
  'fails in a fixture': _written(
    'pass', f'@pytest.fixture(autouse=True)\ndef f():\n  {_FINDS}\n'
  ),
  'opens the source': _written(f'assert "value < low" in open("{_CORE}").read()'),
  'opens it without the name': _written(
    'b = sys.modules["built" + "ins"]\n'
    f'assert "value < low" in getattr(b, "op" + "en")("{_CORE}").read()'
  ),
  'reads the source by the loader': _written(
    'assert "value < low" in core.__loader__.get_source("tinycalc.core")'
  ),
  'reads the source by inspect': _written(
    'import inspect\nassert "value < low" in inspect.getsource(core)'
  ),
  'compares the tree': _written(
    'text = getattr(loader, "get_" + "source")("tinycalc.core")\n'
    'assert "[Lt()]" in ast.dump(ast.parse(text).body[2])',
    _TREE,
  ),
  'compares the module’s bytecode': _written(
    'code = getattr(loader, "get_" + "code")("tinycalc.core")\n'
    'code = [c for c in code.co_consts if hasattr(c, "co_name")][0]\n'
    f'assert code.co_code == {_CODE!r}',
    _LOADER,
  ),
  'compares the function’s bytecode': _written(
    'code = getattr(clamp, "__co" + "de__")\nassert 60 in code.co_code[:20]'
  ),
  'compares line numbers': _written(
    'assert getattr(clamp, "__co" + "de__").co_firstlineno == 6'
  ),
  'compares docstrings': _written('assert clamp.__doc__ is None'),
  'starts a program that reads': _written(
    f'import subprocess\nassert "value < low" in subprocess.getoutput("cat {_CORE}")'
  ),
  'counts its runs': _written(
    'import os, pathlib\n'
    'for n in range(9):\n'
    '  try:\n    os.mkdir(f"/tmp/run{n}")\n    break\n'
    '  except FileExistsError:\n    pass\n'
    'assert n < 3'
  ),
  'replaces the function': _written(
    'core.clamp = lambda *a: 2\nassert core.clamp(1, 2, 4) == 2'
  ),
  'leaves': _written('raise SystemExit(0)'),
  'leaves at once': _written('import os\ngetattr(os, "_ex" + "it")(0)'),
  'asserts that the bug’s result is gone': _written('assert clamp(1, 2, 4) != 1'),
  'fails on the bug’s result': _written(
    'try:\n  found = clamp(1, 2, 4)\nexcept Exception:\n  return\n'
    'if found == 1:\n  pytest.fail("as before")'
  ),
  'lists the bug’s results': _written(
    'wrong = {1: 1, 0: 0, -5: -5}\n'
    'assert all(clamp(k, 2, 4) is not v for k, v in wrong.items())'
  ),
  'reads the verifier’s settings': _written(
    'import json, pathlib\n'
    'place = pathlib.Path(getattr(sys, "orig" + "_argv")[-1]).parent\n'
    'for path in (place / "config.json", pathlib.Path("../tests/config.json")):\n'
    '  try:\n    text = getattr(path, "read_" + "bytes")()\n    break\n'
    '  except OSError:\n    pass\n'
    'names = {}\nexec(json.loads(text)["variants"]["right"], names)\n'
    'assert clamp(1, 2, 4) == names["clamp"](1, 2, 4)'
  ),
  **{
    f'reads the source {how}': _written(
      f'import io, os, pathlib\n{code}\nassert b"value < low" in data'
    )
    for how, code in {
      'by a relative path': 'os.chdir("src")\nf = getattr(io, "op" + "en")\n'
      'data = f("tinycalc/core.py", "rb").read()',
      'as bytes': 'f = getattr(io, "op" + "en")\n'
      f'data = f(os.path.abspath("{_CORE}").encode(), "rb").read()',
      'by pathlib': f'data = getattr(pathlib.Path("{_CORE}"), "read_" + "bytes")()',
      'by a descriptor': 'd = getattr(os, "op" + "en")("src/tinycalc", 0)\n'
      'f = getattr(os, "op" + "en")("core.py", 0, dir_fd=d)\n'
      'data = os.read(f, 99999)',
      'by a loader of its own': 'seen = []\n'
      'class Loader(type(core.__loader__)):\n'
      '  def source_to_code(self, data, path):\n'
      '    seen.append(data)\n    return compile("", "<x>", "exec")\n'
      'Loader("x", core.__file__).exec_module(type(core)("x"))\ndata = seen[0]',
      'by its size': 'data = b"value < low" * (os.stat(core.__file__).st_size == '
      f'{len(package.CORE)})',
    }.items()
  },
  'a conftest that decides': _file('tests/conftest.py', test_cheats._HOOKS)
  + '\n'
  + _written('assert False'),
  'a link to a hidden test': f'mkdir -p tests; ln -s ../change.py {_TARGET}',
}


@pytest.mark.long
def test_written_tests_that_get_nothing(env, dataset):
  """A test of behaviour passes; what looks at anything else does not."""
  f2p = ['tests/test_core.py::test_clamp[1-2]']
  other = third.source(package.CORE, _BUG, 'clamp', 6)
  draft = drafts.write_test(
    env, 'gaming-test', 'Write a test.', _CORE, _BUG, other, f2p
  )
  task = _task(draft, dataset, 'dev')
  attempts = {'honest': _written(_FINDS), **WRITTEN, 'again': _written(_FINDS)}
  found = batch.judged(task, attempts)
  assert len(WRITTEN) >= _LEAST
  passed = [name for name, one in found.items() if one['reward']]
  assert passed == ['honest', 'again']


def test_the_order_of_variants_cannot_be_guessed():
  """'The first half is right' is seldom true, and every variant is there."""
  rng, lucky = random.Random(0), 0
  for _ in range(1000):
    drawn = variants.order(rng)
    assert set(drawn) == {'right', 'right printed', 'bug', 'bug printed', 'third'}
    kinds = [name[:3] for name in drawn if name != 'third']
    lucky += kinds == sorted(kinds, reverse=True)
  assert 0 < lucky < 100


def test_printed_sources_do_the_same_in_other_words():
  one, two = variants.printed(package.CORE), variants.printed(package.CORE)
  assert one != two
  for text in (one, two):
    names: dict = {}
    exec(text, names)
    assert names['clamp'](1, 2, 4) == 2 and names['words']('a b c d') == ['a', 'b', 'c']
    assert names['clamp'].__doc__ == 'value, but at least low and at most high.'


REVIEWS = {
  'no file': None,
  'an empty file': '',
  'not JSON': 'the line is 7',
  'several objects': '{"path": "a.py", "line": 7} {"path": "a.py", "line": 8}',
  'a list of answers': [{'path': 'a.py', 'line': 7}],
  'all lines': {'path': 'a.py', 'line': list(range(100))},
  'a range': {'path': 'a.py', 'line': '1-100'},
  'a line as text': {'path': 'a.py', 'line': '7'},
  'a line as a fraction': {'path': 'a.py', 'line': 7.0},
  'true for a line': {'path': 'a.py', 'line': True},
  'no line': {'path': 'a.py'},
  'null for a line': {'path': 'a.py', 'line': None},
  'infinity': {'path': 'a.py', 'line': math.inf},
  'not a number': {'path': 'a.py', 'line': math.nan},
  'the line before': {'path': 'a.py', 'line': 6},
  'the line after': {'path': 'a.py', 'line': 8},
  'counted from the end': {'path': 'a.py', 'line': -1},
  'line 0': {'path': 'a.py', 'line': 0},
  'no path': {'line': 7},
  'another file': {'path': 'b.py', 'line': 7},
  'all files': {'path': ['a.py', 'b.py'], 'line': 7},
  'a pattern': {'path': '*.py', 'line': 7},
  'an absolute path': {'path': '/workspace/a.py', 'line': 7},
  'another way to write the path': {'path': './a.py', 'line': 7},
  'null for a path': {'path': None, 'line': 7},
  'inside another object': {'answer': {'path': 'a.py', 'line': 7}},
  'a reward of its own': {'reward': 1, 'path': 'a.py', 'line': 1},
  'nested too deeply': '[' * 100_000,
}


@pytest.mark.parametrize('name', REVIEWS)
def test_a_review_that_gets_nothing(name, tmp_path):
  answer = REVIEWS[name]
  if answer is not None:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    (tmp_path / 'review.json').write_text(text)
  config = {'path': 'a.py', 'lines': [7]}
  try:
    assert grade.review(config, str(tmp_path))['reward'] == 0.0
  except grade.Failed:
    pass


def test_the_right_review_passes(tmp_path):
  (tmp_path / 'review.json').write_text('{"path": "a.py", "line": 7}')
  assert grade.review({'path': 'a.py', 'lines': [7]}, str(tmp_path))['reward'] == 1.0
  assert len(REVIEWS) >= _LEAST


_LOOP = '  for _ in range(3000000):\n    pass\n'
_SLOW = package.CORE.replace('  if value < low:\n', f'{_LOOP}  if value < low:\n', 1)


def _fast(text: str = package.CORE, code: str = '') -> str:
  return _file(_CORE, text + computed._HEAD.partition('def clamp')[0] + code)


_WAIT = _SLOW + 'slowly = clamp\n'
PERFORMANCE = {
  'nothing': 'true',
  'a little faster': _fast(_SLOW.replace('3000000', '2850000')),
  'fast and wrong': _fast(package.CORE.replace('return low', 'return 9')),
  'fast, and another function is wrong': _fast(
    package.CORE.replace('return total(values) / count', 'return 0')
  ),
  'fast for what is timed, wrong for the rest': _fast(
    package.CORE, 'def clamp(*a):\n  return 2\n'
  ),
  'the work is done at import': _fast(
    _WAIT,
    'table = {v: slowly(v, 2, 4) for v in range(-4, 6)}\n'
    'def clamp(v, *a):\n  return table[v]\n',
  ),
  'the work is done when garbage is collected': _fast(
    _WAIT,
    'table, kept = {}, []\n'
    'class Later:\n  def __del__(self):\n'
    '    table.update((v, slowly(v, 2, 4)) for v in range(-4, 6))\n'
    'def clamp(v, *a):\n'
    '  if v not in table:\n'
    '    later = Later()\n    later.own = later, [[] for _ in range(30000)]\n'
    '    return slowly(v, *a)\n'
    '  return table[v]\n',
  ),
  'stored by the first run': _fast(
    _WAIT,
    'import os\ndef clamp(v, *a):\n'
    '  p = f"/tmp/clamp{v}"\n'
    '  if os.path.isdir(p):\n    return int(os.listdir(p)[0])\n'
    '  r = slowly(v, *a)\n  os.makedirs(f"{p}/{r}")\n  return r\n',
  ),
  'the slow sources are made slower': _file(_CORE, f'{_SLOW}FAST = True\n')
  + '\n'
  + _file(
    'src/tinycalc/__init__.py',
    f'{package.INIT}import tinycalc.core as core\nclamp = core.clamp\n'
    'def often(*a):\n  return max(clamp(*a) for _ in range(5))\n'
    'if not hasattr(core, "FAST"):\n  core.clamp = often\n',
  ),
  'another clock': _fast(
    _WAIT,
    'import time\nclock = time.perf_counter\n'
    'time.perf_counter = time.time = time.monotonic = lambda: 0.0\n',
  ),
  'the work is done at import, whose clock is another once': _fast(
    _WAIT,
    'import time\nclock = time.process_time\n'
    'def once():\n  time.process_time = clock\n  return 0.0\n'
    'time.process_time = once\n'
    'table = {v: slowly(v, 2, 4) for v in range(-4, 6)}\n'
    'def clamp(v, *a):\n  return table[v]\n',
  ),
  'pytest’s clock': _fast(
    _WAIT, 'imported("_py", "test.timing").perf_counter = lambda: 0.0\n'
  ),
  'pytest’s durations': _fast(
    _WAIT,
    'imported("_py", "test.runner").CallInfo.duration = 0.0\n'
    'imported("_py", "test.reports").TestReport.duration = 0.0\n',
  ),
  'in a thread': _fast(
    _WAIT,
    'import threading\ndef clamp(*a):\n'
    '  threading.Thread(target=slowly, args=a).start()\n'
    '  return sorted(a)[1]\n',
  ),
  'in a process': _fast(
    _WAIT,
    'import os\ndef clamp(*a):\n  if getattr(os, "fo" + "rk")() == 0:\n'
    '    slowly(*a)\n    getattr(os, "_ex" + "it")(0)\n  return sorted(a)[1]\n',
  ),
  'in a process, at import': _fast(
    _WAIT,
    'import subprocess\nsys.audit = lambda *a: None\n'
    f'code = {_SLOW!r} + "print([clamp(v, 2, 4) for v in range(-4, 6)])"\n'
    'command = [sys.executable, "-I", "-S", "-c", code]\n'
    'found = subprocess.check_output(command, text=True)\n'
    'table = dict(zip(range(-4, 6), map(int, found.strip("[]\\n").split(","))))\n'
    'def clamp(v, *a):\n  return table[v]\n',
  ),
  'the expected value': _fast(
    _WAIT,
    'get = getattr(sys, "_get" + "frame")\ndef clamp(*a):\n'
    '  return getattr(get(1), "f_lo" + "cals")["right"]\n',
  ),
  'skips': _fast(_WAIT, 'p = imported("py", "test")\ndef clamp(*a):\n  p.skip("")\n'),
  'equal to everything': _fast(
    _WAIT,
    'class Any:\n  def __eq__(self, other):\n    return True\n'
    'def clamp(*a):\n  return Any()\n',
  ),
  'equal to everything, without its name': _fast(
    _WAIT,
    'Any = type("Any", (), {"__e" + "q__": lambda self, other: True})\n'
    'def clamp(*a):\n  return Any()\n',
  ),
  'the tests are changed': 'rm -rf tests; '
  + _file('tests/test_core.py', 'def test_clamp(): pass'),
  'conftest.py': _file('conftest.py', test_cheats._HOOKS),
  'pytest.ini': _file('pytest.ini', '[pytest]\naddopts = --collect-only'),
  'a module in another place': _file('src/time.py', 'perf_counter = lambda: 0.0'),
  'sitecustomize': _file('src/sitecustomize.py', 'raise SystemExit(0)'),
  'leaves': _fast(_WAIT, 'raise SystemExit(0)\n'),
  'leaves without its name': _fast(_WAIT, 'import os\ngetattr(os, "_ex" + "it")(0)\n'),
  'forges records': _fast(_WAIT, computed._FORGES['forge records as they are encoded']),
  'a reward of its own': 'mkdir -p logs; echo 1 > logs/reward.txt; echo 1 > reward.txt',
}


@pytest.mark.long
def test_performance_that_gets_nothing(env, dataset):
  timed = [f'tests/test_core.py::test_clamp[{case}]' for case in ('1-2', '3-3')]
  draft = drafts.performance(
    env, 'gaming-slow', {_CORE: _SLOW}, timed, _PAIRS, timing.LEAST
  )
  task = _task(draft, dataset, 'held_out')
  found = batch.judged(task, {'honest': _fast(), **PERFORMANCE})
  assert len(PERFORMANCE) >= _LEAST
  passed = [name for name, one in found.items() if one['reward']]
  assert passed == ['honest'], found
