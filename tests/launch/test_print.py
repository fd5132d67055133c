"""`python -m launch.print`: what it prints is in the docs, and what --run runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch import options
from launch import print as launch_print
from launch.config import Command, LaunchError

_ROOT = Path(launch_print.__file__).parent.parent
_DOCS = (_ROOT / 'docs' / 'launch.md').read_text()
_BLOCKS = re.findall(r'```console\n\$ (.*?[^\\])\n(.*?)```', _DOCS, re.DOTALL)
_CALL = '--flagfile=launch/example.flags --target={} --step={}'


def call(text: str, capsys) -> tuple[str, str, int]:
  """Output, errors and code of `python -m launch.print`, in this process."""
  values = options.FLAGS
  try:
    launch_print.main(values(['print', *shlex.split(text)]))
    code = 0
  except SystemExit as error:
    code = error.code
  finally:
    values.unparse_flags()
    for name in values:
      values[name].unparse()
  return *capsys.readouterr(), code


@pytest.mark.parametrize(('command', 'output'), _BLOCKS)
def test_each_command_of_the_docs_is_a_builders(command, output, capsys, monkeypatch):
  """The walk shows what the code prints today, to the letter."""
  monkeypatch.chdir(_ROOT)
  command = command.replace('\\\n', ' ')
  program, args = 'python -m launch.print ', command
  assert args.startswith(program)
  printed, _, code = call(args.removeprefix(program), capsys)
  assert (printed, code) == (output, 0)


def test_the_docs_have_the_whole_walk():
  """Every step of every target is shown, and the flag file as it is."""
  shown = {
    (m[1], m[2] or 'run')
    for command, _ in _BLOCKS
    if (m := re.search(r'--target=(\w+)(?: --step=(\w+))?', command))
  }
  steps = {(t, s) for t, steps in launch_print.TARGETS.items() for s in steps}
  assert steps == shown
  assert (_ROOT / 'launch' / 'example.flags').read_text() in _DOCS


def test_a_plain_call_prints_and_warns(capsys):
  """No job writes to a bucket: a workdir in one is printed with a warning, and none is
  chosen where there is no storage."""
  flags_ = '--project=p --zone=us-east5-a --cluster=c --image=i --bucket=gs://b'
  out, err, code = call(f'--target=xpk --topology=v5p:4x4x4 {flags_}', capsys)
  assert (out, code) == ('', 2) and 'set --storage or --workdir' in err
  flags_ += ' --workdir=gs://b/m2jax'
  out, err, code = call(f'--target=xpk --topology=v5p:4x4x4 {flags_}', capsys)
  assert code == 0
  assert '--tpu-type=v5p-4x4x4' in out and '--workdir=gs://b/m2jax/trainer' in out
  assert err.count('warning: ') == 1 and 'gs://b/m2jax/trainer' in err
  out, err, code = call(f'--target=xpk --topology=v5p:4x4x4 --run {flags_}', capsys)
  assert (out, code) == ('', 2) and 'not run' in err


def test_run_stops_at_the_first_failure(tmp_path):
  """A manifest goes to standard input; after a failure nothing else is started."""
  there, never = tmp_path / 'there', tmp_path / 'never'
  found = [
    Command(('sh', '-c', f'cat > {there}'), 'text'),
    Command(('sh', '-c', 'exit 3')),
    Command(('touch', str(never))),
  ]
  with pytest.raises(LaunchError, match='sh exited with code 3'):
    launch_print.execute(found)
  assert there.read_text() == 'text' and not never.exists()
  with pytest.raises(LaunchError, match='nosuchprogram is not installed'):
    launch_print.execute([Command(('nosuchprogram',))])


def test_command_line(tmp_path):
  """--run runs: here with a gcloud and a kubectl that only write down their calls."""
  for name in ('gcloud', 'kubectl'):
    program = tmp_path / name
    program.write_text(f'#!/bin/sh\n(echo {name} "$@"; cat) >> {tmp_path}/calls\n')
    program.chmod(0o755)
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'launch.print',
      *_CALL.format('jobset', 'run').split(),
      '--run',
    ],
    cwd=_ROOT,
    env={'PATH': f'{tmp_path}:/usr/bin:/bin'},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  calls = (tmp_path / 'calls').read_text()
  assert re.search(r'^gcloud container.*\nkubectl create.*\napiVersion:', calls, re.M)
  unknown = [sys.executable, '-m', 'launch.print', *_CALL.format('xpk', 'x').split()]
  done = subprocess.run(unknown, cwd=_ROOT, capture_output=True, text=True)
  assert done.returncode == 2 and 'has the steps cluster, storage, run' in done.stderr
