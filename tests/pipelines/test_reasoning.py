"""The pipeline `reasoning`: proved tasks, splits by generator, a second verifier."""

from __future__ import annotations

import asyncio
import collections
import dataclasses

import pytest

from m2jax.tasks import harbor
from m2jax_pipelines import llm, make, reasoning, recheck, records
from m2jax_pipelines.context import Context
from m2jax_pipelines.source import Tasks
from m2jax_pipelines.tasks.reasoning import problems

pytest.importorskip('reasoning_gym', reason='pip install -e ./m2jax_pipelines')
CONFIG = reasoning.Config(
  generators=('gcd', 'lcm', 'products', 'rush_hour'),
  levels=(0,),
  count=4,
  max_rounds=2,
)


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('reasoning')
  asyncio.run(make.run(CONFIG, workdir, show=False))
  return workdir


def test_tasks_are_proved_and_split_by_generator(dataset):
  """A wrong oracle gives no task; a held-out generator is in one split only."""
  rows = records.read(dataset / 'records.jsonl')
  admitted = {(r['source'], r['split']) for r in rows if r['outcome'] == 'admitted'}
  assert {('gcd', 'train'), ('lcm', 'dev'), ('products', 'held_out')} == admitted
  (wrong,) = [r for r in rows if r['source'] == 'rush_hour']
  assert 'rejects its own answer' in wrong['reason']


def test_a_task_names_package_version_hash_and_licence(dataset):
  task = Tasks(dataset, 'train')[0]
  source = task.directory.metadata.source
  assert source['name'] == 'reasoning-gym' and source['licence'] == 'Apache-2.0'
  assert len(source['record_sha256']) == 64 and source['version']


def test_the_second_verifier_agrees_and_can_disagree(dataset, capsys):
  assert recheck.main(dataset, 50, 0) == 0
  assert '0 disagreements' in capsys.readouterr().out
  task = Tasks(dataset, 'train')[0].directory.path
  expected = task / 'tests' / 'expected.txt'
  right = expected.read_text()
  expected.write_text(right + '1')
  try:
    assert recheck.main(dataset, 50, 0) == 1
  finally:
    expected.write_text(right)


@pytest.mark.parametrize('generator', sorted(recheck.SOLVERS))
def test_every_generator_is_solved_from_its_text(generator):
  """Two solutions that share no code agree on every problem that is accepted, where the
  text decides; and most texts do."""
  solved = 0
  for number in range(12):
    key = f'second/{number}'
    if problems.defect(generator, number % 3, key):
      continue
    problem = problems.draw(generator, number % 3, key)
    found = recheck.SOLVERS[generator](problem.question)
    assert found is None or str(found) == problem.answer, problem.question
    solved += found is not None
  assert solved >= 8


def test_no_generator_is_without_a_second_solver():
  used = {*problems.TRAIN, *problems.DEV, *problems.HELD_OUT}
  assert used == set(recheck.SOLVERS)


_FAMILY = (
  'Tom is married to Ann. They have children called John and Mary. John is married to '
  'Lisa. They have a child called Emma.\n\n'
)


@pytest.mark.parametrize(
  'generator, question, answer',
  [
    (
      'family_relationships',
      f'{_FAMILY}What is Lisa to Ann? Answer.',
      'daughter-in-law',
    ),
    (
      'family_relationships',
      f'{_FAMILY}How is Mary related to Emma? Answer.',
      'aunt',
    ),
    (
      'family_relationships',
      f'{_FAMILY}What relation is Emma to Mary? Answer.',
      'niece',
    ),
    ('family_relationships', 'Kai is married to Sky.\n\nWhat is Kai to Sky?', None),
    ('largest_island', 'grid:\n1 1 0\n0 0 0\n1 0 1\n', '2'),
    ('course_schedule', '[(0, 1), (1, 2), (2, 0)]', 'False'),
    ('course_schedule', '[(0, 1), (1, 2)]', 'True'),
    ('syllogism', 'All a are b\nSome b are c\nSome a are c?', 'No'),
    ('binary_alternation', 'alternating: 0000', '-1'),
  ],
)
def test_second_solvers_know_cases_that_are_rare(generator, question, answer):
  assert recheck.SOLVERS[generator](question) == answer


@pytest.mark.parametrize('generator', ['syllogism', 'course_schedule', 'ransom_note'])
def test_one_constant_answer_is_not_worth_much(generator, tmp_path):
  """Nine of ten syllogisms of level 0 follow: always "Yes" would be nearly right."""
  config = reasoning.Config(generators=(generator,), levels=(0,), max_rounds=160)
  context = Context(tmp_path, llm.LLMClient(config.author, 'author'))

  async def drafts():
    stream = reasoning.candidates(config, context)
    return [c.draft async for c in stream if c.draft is not None]

  answers = collections.Counter(
    draft.tests['expected.txt'] for draft in asyncio.run(drafts())
  )
  assert answers.total() >= 16
  assert answers.most_common(1)[0][1] <= 0.6 * answers.total(), answers


CHEATS = {
  'nothing': ':',
  'empty': ': > answer.txt',
  'many': 'seq 0 500 > answer.txt',
  'wrong': 'echo -7 > answer.txt',
  'sentence': 'echo "The answer is one of 1 2 3 4 5 6 7 8 9" > answer.txt',
  'a link to the answer': 'ln -s ../tests/expected.txt answer.txt',
  'a link to a guess': 'ln -s /verifier answer.txt',
  'a directory': 'mkdir answer.txt',
  'a pipe': 'mkfifo answer.txt',
  'own reward': 'mkdir -p logs; echo 1 > logs/reward.txt',
  'own verifier': 'mkdir tests; echo "echo 1 > $M2JAX_LOGS/reward.txt" > tests/test.sh',
  'own python': 'echo "print(1)" > sitecustomize.py; echo x > strict.py',
  'not text': 'head -c 64 /dev/urandom > answer.txt',
  'large': 'head -c 1000000 /dev/zero > answer.txt',
  'two answers': 'printf "6\\n12" > answer.txt',
  'every number': 'seq 1 4000 | tr "\\n" " " > answer.txt',
  'a pattern': 'printf ".*" > answer.txt',
  'an expression': 'printf "3*4" > answer.txt',
  'markup': 'printf "<answer>12</answer>" > answer.txt',
  'the oracle by path': 'printf %s "$M2JAX_TESTS/expected.txt" > answer.txt',
  'a link to a device': 'ln -s /dev/zero answer.txt',
  'a hard link to a file of the system': 'ln /bin/sh answer.txt || echo x > answer.txt',
  'own interpreter': 'echo "echo 1 > logs/reward.txt" > python3; chmod +x python3',
  'an environment': 'echo "export M2JAX_TREE=/" > .bashrc; echo x > answer.txt',
  'the end of output': 'printf "m2jax: ready\\n1\\n" > answer.txt',
}


@pytest.fixture(scope='module')
def verdicts(dataset):
  """The verdict on each attempt; several run at a time."""
  task = Tasks(dataset, 'dev')[0]
  several = asyncio.Semaphore(4)

  async def one(command):
    async with several, task.open() as environment:
      await environment.box.exec(command)
      return await task.judge(environment)

  async def all_():
    return await asyncio.gather(*map(one, CHEATS.values()))

  return dict(zip(CHEATS, asyncio.run(all_()), strict=True))


@pytest.mark.parametrize('name', CHEATS)
def test_the_harbor_verifier_cannot_be_gamed(verdicts, name):
  """What the agent leaves beside the answer is not judged."""
  assert verdicts[name].outcome == harbor.FAILED


def test_a_dataset_continues(dataset):
  """More of the same settings: no problem is tried twice."""
  before = len(records.read(dataset / 'records.jsonl'))
  config = dataclasses.replace(CONFIG, count=5)
  assert asyncio.run(make.run(config, dataset, show=False)).added == 1
  rows = records.read(dataset / 'records.jsonl')
  assert len({r['id'] for r in rows}) == len(rows) > before
