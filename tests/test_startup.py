"""What a process sets up before it uses jax: devices, XLA's flags, and memory."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests import processes

_HUGE = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')


def run(*arguments: str, **environment: str) -> list[str]:
  done = processes.run('tests.startup_worker', *arguments, **environment)
  if done.returncode == 3:
    pytest.skip('the C library is not glibc')
  assert not done.returncode, done.stderr
  return done.stdout.split()


def test_a_step_takes_no_new_pages():
  kept, given_back = (float(run('faults', how)[0]) for how in ('keep', 'give_back'))
  assert 10 * kept < given_back


def test_devices_and_flags():
  """A device per core and the widest vectors; what the user set has the last word."""
  devices, flags = run('prepared', '3', XLA_FLAGS='--xla_cpu_use_xnnpack=false')
  assert devices == '3'
  assert re.fullmatch('--xla_cpu_prefer_vector.*,--xla_cpu_use_xnnpack=false', flags)
  assert run('prepared', '3', JAX_NUM_CPU_DEVICES='2', XLA_FLAGS='')[0] == '2'


def test_memory_comes_in_huge_pages():
  if not _HUGE.exists() or '[never]' in _HUGE.read_text():
    pytest.skip('this kernel gives none')
  assert float(run('huge')[0]) > 0.8
