"""Every term of a trajectory's loss, printed from the pool."""

from __future__ import annotations

import json

import pytest

from tests import processes
from tests.viewer.conftest import workdir  # noqa: F401


def replay(workdir, *flags):  # noqa: F811
  return processes.run('experiments.replay', f'--workdir={workdir}', *flags)


def test_terms(workdir):  # noqa: F811
  """Each sampled token with what the learner was given for it, at full precision."""
  done = replay(workdir, '--trajectory=s0.1', '--json')
  assert done.returncode == 0, done.stderr
  terms = [json.loads(line) for line in done.stdout.splitlines()]
  assert [t['id'] for t in terms] == [10, 11, 13, 20, 21]
  assert [t['old_logprob'] for t in terms] == [-0.25, -0.5, -0.75, -0.25, -0.5]
  assert [t['version'] for t in terms] == [3, 3, 4, 3, 4]
  assert {t['advantage'] for t in terms} == {1.0}
  assert [t['weight'] for t in terms] == pytest.approx([1 / 20] * 5)


def test_a_beginning_of_several_is_refused(workdir):  # noqa: F811
  """The sessions that it could be are named in one line."""
  done = replay(workdir, '--trajectory=s0.')
  assert done.returncode == 2 and 's0.0, s0.1' in done.stderr
  assert len(done.stderr.splitlines()) == 1
