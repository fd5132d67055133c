r"""Counts the task directories of a workdir that Harbor's own package accepts.

    python3.12 -m venv /tmp/harbor && /tmp/harbor/bin/pip install harbor
    python -m benchmarks.harbor_check --workdir=workdir/swe \
      --python=/tmp/harbor/bin/python

Harbor needs Python 3.12 and pins of its own, so its `Task` runs in the
interpreter that is named. A directory is accepted if `Task` validates task.toml
and the files it names, the paths are complete, instruction.md is not empty and the
environment has a Dockerfile. Prints the version, the counts and the refused
directories; exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

from m2jax.observe.printable import printable

_CHECK = r"""
import importlib.metadata, json, pathlib, sys
from harbor.models.task.task import Task
refused = {}
for line in sys.stdin:
  path = pathlib.Path(line.rstrip('\n'))
  try:
    task = Task(path)
    if not Task.is_valid_dir(path):
      raise ValueError('its paths are incomplete')
    if task.paths.discovered_solve_path is None:
      raise ValueError('no solution')
    if not task.instruction.strip():
      raise ValueError('the instruction is empty')
    if not (task.paths.environment_dir / 'Dockerfile').is_file():
      raise ValueError('no Dockerfile')
    if not task.config.metadata['m2jax']['pipeline']:
      raise ValueError('the metadata are lost')
  except Exception as error:
    refused[str(path)] = f'{type(error).__name__}: {error}'
print(json.dumps([importlib.metadata.version('harbor'), refused]))
"""


def check(python: str, paths: list[pathlib.Path]) -> tuple[str, dict[str, str]]:
  """Returns (version of harbor, refused directory → why).

  Raises:
    RuntimeError: the interpreter has no harbor, or the check itself failed.
  """
  lines = ''.join(f'{path.resolve()}\n' for path in paths)
  command = [python, '-I', '-c', _CHECK]
  done = subprocess.run(command, input=lines, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f'{python}: {done.stderr.strip()[-500:]}')
  version, refused = json.loads(done.stdout.splitlines()[-1])
  return version, refused


def chosen(workdir: pathlib.Path, count: int) -> list[pathlib.Path]:
  """Directories of `count` tasks of a dataset, evenly; 0 is all."""
  paths = sorted(workdir.glob('tasks/[!.]*/[!.]*'))
  return paths[:: max(1, len(paths) // count)][:count] if count else paths


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--python', required=True, help='interpreter that has harbor')
  parser.add_argument('--workdir', type=pathlib.Path, required=True, nargs='+')
  parser.add_argument('--tasks', type=int, default=0, help='of each; 0 is all')
  options = parser.parse_args(argv)
  failed = False
  for workdir in options.workdir:
    paths = chosen(workdir, options.tasks)
    version, refused = check(options.python, paths)
    accepted = len(paths) - len(refused)
    print(f'{workdir}: harbor {version} accepts {accepted} of {len(paths)} directories')
    for path, reason in refused.items():
      print(printable(f'  {path}: {reason}'))
    failed |= bool(refused) or not paths
  return int(failed)


if __name__ == '__main__':
  sys.exit(main())
