"""`m2jax JOB --config=NAME[:variant] …` runs a job of `experiments` in any directory.

In a checkout it is `python -m experiments.JOB`. A wheel has the jobs and their configs
in m2jax/_jobs (setup.py), which only this command puts on the path.
"""

from __future__ import annotations

import ast
import os
import pathlib
import runpy
import sys

_PACKAGE = pathlib.Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / '_jobs'
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent


def jobs() -> dict[str, str]:
  """Each job, with the first line of its docstring."""
  found = {}
  for path in sorted((FOLDER / 'experiments').glob('*.py')):
    code = path.read_text('utf-8')
    if "__name__ == '__main__'" in code:
      found[path.stem] = (ast.get_docstring(ast.parse(code)) or '').partition('\n')[0]
  return found


def main() -> None:
  """Runs the job that the first argument names; exits with code 2 if there is none."""
  known = jobs()
  job, *flags = sys.argv[1:] or ['']
  if job not in known:
    asked = job in ('-h', '--help')
    lines = ['usage: m2jax JOB --config=NAME[:variant] --workdir=FOLDER …', '']
    lines += [f'  {name:<16} {summary}' for name, summary in known.items()]
    if not asked:
      lines += ['', f'error: unknown job {job!r}' if job else 'error: no job']
    print('\n'.join(lines), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)
  sys.path.insert(0, str(FOLDER))
  sys.path.append(os.getcwd())  # of kinds that are import paths
  sys.argv[:] = [f'm2jax {job}', *flags]
  runpy.run_module(f'experiments.{job}', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main()
