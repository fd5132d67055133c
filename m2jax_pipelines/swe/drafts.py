"""Task directories of SWE-scaling: which files an agent sees, and what judges it."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from m2jax.tasks import harbor
from m2jax.tasks.harbor import compose
from m2jax_pipelines.llm import SCRIPTED
from m2jax_pipelines.swe import environment, reaches
from m2jax_pipelines.swe.environment import Environment

_TEST_SH = b"""\
#!/bin/bash
# From there, so that its command line does not name the place.
cd "${M2JAX_TESTS:-/tests}" && exec python3 -I -S -B grade.py
"""
_SOLVE = """\
#!/bin/bash
set -eu
cd "${M2JAX_WORKSPACE:-/workspace}"
cp -r "${M2JAX_SOLUTION:-/solution}/files/." .
"""
_SPARE_S = 10.0


def limit_s(env: Environment) -> float:
  """Time for the tests of a package, on a loaded machine."""
  return round(_SPARE_S + 8 * (env.import_s + sum(env.seconds.values())), 1)


def repair(
  env: Environment,
  name: str,
  family: str,
  instruction: str,
  before: Mapping[str, bytes],
  f2p: Sequence[str],
  p2p: Sequence[str],
  *,
  gone: Iterable[str] = (),
  details: Mapping[str, Any] | None = None,
) -> harbor.Draft:
  """A task to change sources so that F2P ∧ P2P is true.

  Args:
    before: sources as the agent gets them, where they differ from the release.
    gone: sources of the release that the agent does not get.
  """
  now = {path: data for path, data in env.source.files.items() if path in before}
  now |= {path: env.source.files[path] for path in gone}
  removed = [path for path in before if path not in env.source.files]
  solve = _SOLVE + ''.join(f'rm -f {json.dumps(path)}\n' for path in removed)
  config = {
    'kind': 'tests',
    **_config(env),
    'files': sorted({test_file(t) for t in (*f2p, *p2p)}),
    'f2p': sorted(f2p),
    'p2p': sorted(p2p),
    'status': {t: s for t, s in env.status.items() if s != 'PASSED'},
    'canaries': _canaries(env, f2p),
  }
  hidden = {test_file(test) for test in f2p}
  return _draft(
    env,
    name,
    family,
    instruction,
    config,
    collect=env.code,
    exclude=environment.EXCLUDE,
    overlay=before,
    remove=sorted({*hidden, *gone}),
    solution={
      'solve.sh': solve.encode(),
      'gold.patch': patch({**before}, {**now}).encode(),
      **{f'files/{path}': data for path, data in now.items()},
    },
    details={'f2p': len(f2p), 'p2p': len(p2p), **(details or {})},
  )


def write_test(
  env: Environment,
  name: str,
  instruction: str,
  path: str,
  bug: str,
  third: str,
  f2p: Sequence[str],
) -> harbor.Draft:
  """SWE-Test: a task to write a test that fails on the bug and passes without it.

  Args:
    path: the file with the bug.
    bug, third: the file's text with the bug, and with a further one (`third.source`).
    f2p: tests of the package that fail on the bug.
  """
  right = env.source.files[path].decode()
  hidden = sorted({test_file(test) for test in f2p})
  target = regression_test(hidden[0])
  config = {
    'kind': 'written_test',
    **_config(env),
    'test': target,
    'source_path': path,
    'variants': {'right': right, 'bug': bug, 'third': third},
  }
  return _draft(
    env,
    name,
    'test',
    instruction,
    config,
    collect=(target,),
    exclude=(),
    overlay={path: bug.encode()},
    remove=hidden,
    solution={
      'solve.sh': _SOLVE.encode(),
      f'files/{target}': env.source.files[hidden[0]],
    },
    details={'f2p': len(f2p)},
  )


def performance(
  env: Environment,
  name: str,
  slow: Mapping[str, str],
  timed: Sequence[str],
  pairs: int,
  least: float,
  shown: Mapping[str, bytes] | None = None,
  judged: Mapping[str, bytes] | None = None,
) -> harbor.Draft:
  """A task to make the code under `timed` tests faster, by at least `least`.

  Args:
    slow: sources as the agent gets them.
    timed: tests.
    pairs: number of pairs of runs that are compared.
    least: gain in time.
    shown: tests that the release does not have, as the agent sees them.
    judged: the same files as they are run for the verdict.
  """
  before = {path: text.encode() for path, text in slow.items()}
  now = {path: env.source.files.get(path, b'') for path in before}
  config = {
    'kind': 'performance',
    **_config(env),
    'files': sorted({test_file(t) for t in env.status}),
    'p2p': sorted(env.status),
    'status': {t: s for t, s in env.status.items() if s != 'PASSED'},
    'canaries': _canaries(
      env, [t for t in env.status if test_file(t) not in env.untimed_canaries]
    ),
    'timed': sorted(timed),
    # All of them: the agent's could make the slow ones slower.
    'slow': {**_sources(env), **slow},
    'pairs': pairs,
    'least': least,
  }
  listed = '\n'.join(f'- `{test}`' for test in sorted(timed)[:10])
  instruction = (
    f'# {env.source.name}: slow\n\nThe code under these tests takes too long:\n\n'
    f'{listed}\n\nMake it faster by at least {least:.0%}. All tests must still pass.\n'
  )
  if judged:
    instruction += 'The verdict is on arguments of other sizes, too.\n'
  draft = _draft(
    env,
    name,
    'performance',
    instruction,
    config,
    collect=env.code,
    exclude=environment.EXCLUDE,
    overlay={**before, **(shown or {})},
    remove=(),
    solution={
      'solve.sh': _SOLVE.encode(),
      'gold.patch': patch(before, now).encode(),
      **{f'files/{path}': data for path, data in now.items()},
    },
    details={'timed': len(timed)},
  )
  ours = {f'workspace/{path}': data for path, data in (judged or {}).items()}
  # Two runs a pair, and all pairs may be run again.
  seconds = 4 * pairs * limit_s(env) + 30
  return dataclasses.replace(draft, tests={**draft.tests, **ours}, verifier_s=seconds)


def review(
  env: Environment,
  name: str,
  instruction: str,
  changed: Mapping[str, bytes],
  path: str,
  lines: Sequence[int],
) -> harbor.Draft:
  """Code review: a task to say which change of a diff is wrong."""
  diff = patch({p: env.source.files[p] for p in changed}, changed)
  answer = json.dumps({'path': path, 'line': lines[0]})
  return _draft(
    env,
    name,
    'review',
    instruction,
    {'kind': 'review', **_config(env), 'path': path, 'lines': list(lines)},
    collect=('review.json',),
    exclude=(),
    overlay={**changed, 'change.diff': diff.encode()},
    remove=sorted(env.files),  # reading is asked for, not running
    solution={'solve.sh': _SOLVE.encode(), 'files/review.json': answer.encode()},
    details={},
  )


def regression_test(hidden: str) -> str:
  """Path of the test that an agent writes, beside a hidden one."""
  directory, slash, _ = hidden.rpartition('/')
  return f'{directory}{slash}test_regression_of_bug.py'


def test_file(test: str) -> str:
  """The file of a test's id."""
  return test.partition('::')[0]


def patch(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
  """A unified diff of files."""
  parts = []
  for path in sorted({*before, *after}):
    old, new = (
      files.get(path, b'').decode(errors='replace').splitlines(keepends=True)
      for files in (before, after)
    )
    parts += difflib.unified_diff(old, new, f'a/{path}', f'b/{path}')
  return ''.join(p if p.endswith('\n') else p + '\n' for p in parts)


def _canaries(env: Environment, tests: Sequence[str]) -> list[list[str]]:
  """Number of the canary → the tests whose canary fails on the right sources."""
  found = [sorted(set(tests) & set(fails)) for fails in env.canaries]
  while found and not found[-1]:
    found.pop()
  return found


def _config(env: Environment) -> dict[str, Any]:
  return {
    'roots': list(env.roots),
    'limit_s': limit_s(env),
    'collect': list(env.code),
    'exclude': list(environment.EXCLUDE),
    'known': sorted(known(env)),
    'audited': list(env.audited),
  }


def _sources(env: Environment) -> dict[str, str]:
  """{path: text} of the files of the release that are work; undecodable bytes stay."""
  policy = env.code, environment.EXCLUDE
  return {
    path: data.decode(errors='surrogateescape')
    for path, data in env.source.files.items()
    if compose.is_work(path, *policy)
  }


def known(env: Environment) -> set[str]:
  """Names of the package's own sources that `reaches` would refuse."""
  found = set()
  for path, data in env.source.files.items():
    if path.endswith('.py') and not environment.is_test(path):
      found |= reaches.reaches(data.decode(errors='replace'))
  return found


def _draft(
  env, name, family, instruction, config, *, collect, exclude, overlay, remove,
  solution, details,
) -> harbor.Draft:  # fmt: skip
  return harbor.Draft(
    name=name,
    instruction=instruction,
    metadata=harbor.Metadata(
      pipeline='swe',
      family=family,
      collect=tuple(collect),
      exclude=tuple(exclude),
      remove=tuple(remove),
      site=env.site,
      hide=(env.module,),
      source=env.source.provenance,
      baseline_calls=2,
      details={'author': SCRIPTED, **details},
    ),
    archive=env.source.archive,
    overlay=overlay,
    tests={
      'test.sh': _TEST_SH,
      'config.json': json.dumps(config).encode(),
      **environment.shipped(),
    },
    solution=solution,
    install=env.requirements,
    verifier_s=6 * limit_s(env) + 30,
  )
