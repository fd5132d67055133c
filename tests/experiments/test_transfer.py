"""A pool to a file and back, by the job."""

from __future__ import annotations

import json

import pytest
from atif import Trajectory as AtifTrajectory

from experiments import transfer as job
from m2jax.pool.data_pool import DataPool
from tests import processes
from tests.pool.test_data_pool import completion, play, trajectory


def transfer(*flags):
  return processes.run('experiments.transfer', *flags)


def test_to_a_file_and_back(tmp_path):
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:  # stays open, as in a run
    play(pool, 0)
    pool.add_completion(completion('e'))
    messages = {'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}
    pool.add_trajectory(trajectory('e', -1, messages=messages))
    pool.flush()
    lines, documents = tmp_path / 'pool.jsonl', tmp_path / 'atif.jsonl'
    done = transfer(f'--workdir={tmp_path}', f'--to={lines}')
    assert done.returncode == 0, done.stderr
    done = transfer(f'--workdir={tmp_path}', f'--to={documents}', '--format=atif')
    assert done.returncode == 0, done.stderr
    # Both trajectories of the group have two completions, but no reply.
    said = (
      '3 trajectories: 0 replies have no token ids, and 4 completions that no reply'
    )
    assert said in done.stderr
    copy = f'sqlite:///{tmp_path}/copy.db'
    done = transfer(f'--pool={copy}', f'--from={lines}')
    assert done.returncode == 0, done.stderr
    with DataPool(copy) as other:
      assert other.run == pool.run and other.group(0) == pool.group(0)
  found = [json.loads(line) for line in documents.read_text().splitlines()]
  for document in found:
    AtifTrajectory.model_validate(document)
  assert [d['session_id'] for d in found] == ['0.0.0', '0.0.1', 'e']
  assert found[-1]['steps'][1]['metrics']['completion_token_ids'] == [4, 5]
  done = transfer(f'--pool={copy}', f'--from={lines}')
  assert done.returncode != 0 and 'has items already' in done.stderr


def test_a_file_that_is_not_finished_replaces_none(tmp_path):
  """What interrupts the writing leaves the file as it was."""

  def lines():
    yield 'new'
    raise OSError('the pool is away')

  path = tmp_path / 'pool.jsonl'
  path.write_text('old\n')
  with pytest.raises(OSError, match='away'):
    job._write(path, lines())
  assert path.read_text() == 'old\n'
