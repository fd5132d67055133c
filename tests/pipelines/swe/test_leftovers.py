"""What tests leave running is ended, and nothing else on the machine."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m2jax_pipelines.swe import grade, processes

# Starts a daemon as code under test may: two forks and a session of its own.
_DAEMON = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import processes
processes.adopt()
ready, writer = os.pipe()
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    os.write(writer, str(os.getpid()).encode())
    time.sleep(60)
  os._exit(0)
daemon = int(os.read(ready, 20))
processes.end_children()
try:
  os.kill(daemon, 0)
  print('the daemon lives')
except ProcessLookupError:
  print('the daemon is gone')
"""
_MULTIPLIES = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import processes
processes.adopt()
processes._children = lambda: []  # as if each child were replaced before it is seen
if os.fork() == 0:
  time.sleep(20)
  os._exit(0)
try:
  processes.end_children(0.2)
except TimeoutError as error:
  print(error)
"""


def _run(code: str) -> str:
  place = str(Path(processes.__file__).parent)
  done = subprocess.run(
    [sys.executable, '-c', code, place], capture_output=True, text=True, timeout=30
  )
  return done.stdout.strip() or done.stderr


def test_a_daemon_is_ended_and_a_bystander_is_not():
  """Outside a sandbox too: the verifier once ended every process that it could."""
  bystander = subprocess.Popen(['sleep', '60'])
  try:
    assert _run(_DAEMON) == 'the daemon is gone'
    time.sleep(0.05)
    assert bystander.poll() is None
  finally:
    bystander.kill()
    bystander.wait()


def test_processes_that_do_not_end_are_a_failure():
  assert _run(_MULTIPLIES) == 'processes multiply faster than they end'


def test_without_adoption_nothing_is_graded(monkeypatch):
  """A system that cannot say what belongs to the tests: refused, before any runs."""

  class Libc:
    def prctl(self, *arguments):
      return -1

  monkeypatch.setattr(ctypes, 'CDLL', lambda name: Libc())
  with pytest.raises(OSError, match='cannot be ended'):
    processes.adopt()


@pytest.mark.parametrize('command', [['true'], ['sleep', '60']])
def test_a_process_that_runs_tests_and_does_not_answer_is_a_failure(
  command, monkeypatch
):
  """It is ended or stopped by what it runs: the attempt fails, and nothing waits."""
  server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
  monkeypatch.setattr(grade, '_ANSWER_S', 0.5)
  with pytest.raises(grade.Failed, match='end the process'):
    grade._ask(server, {'limit_s': 0.0})
  assert server.wait(10) is not None
