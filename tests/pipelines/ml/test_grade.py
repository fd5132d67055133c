"""The verifier of ML tasks: metrics, medals, right answers in other forms, gaming."""

from __future__ import annotations

import asyncio
import json
import os
import random

import numpy as np
import pytest

from m2jax import sandbox
from m2jax.tasks import harbor
from m2jax_pipelines.ml import grade, ladder, problems

TRUTH = {f'r{i}': float(i % 7) for i in range(40)}
SPEC = {'metric': 'rmse', 'baseline': 2.0, 'bronze': 1.0, 'silver': 0.5, 'gold': 0.1}


def csv_of(values) -> bytes:
  return ('id,target\n' + ''.join(f'{k},{v}\n' for k, v in values.items())).encode()


def test_metrics_are_those_of_scikit_learn():
  metrics = pytest.importorskip('sklearn.metrics', reason='m2jax_pipelines[ml]')
  stats = pytest.importorskip('scipy.stats')
  rng = np.random.default_rng(0)
  truth, found = (rng.integers(0, 4, 200).tolist() for _ in range(2))
  binary = rng.integers(0, 2, 200).tolist()
  ours = {name: function for name, (function, *_) in grade.METRICS.items()}
  f1 = metrics.f1_score(truth, found, average='macro')
  pairs = [
    (ours['accuracy'](truth, found), metrics.accuracy_score(truth, found)),
    (ours['macro_f1'](truth, found), f1),
    (ours['ari'](truth, found), metrics.adjusted_rand_score(truth, found)),
    (ours['auc'](binary, found), metrics.roc_auc_score(binary, found)),
    (ours['spearman'](truth, found), stats.spearmanr(truth, found).statistic),
    (ours['rmse'](truth, found), metrics.root_mean_squared_error(truth, found)),
    (ours['mae'](truth, found), metrics.mean_absolute_error(truth, found)),
    (
      ours['rmsle'](truth, found),
      metrics.root_mean_squared_log_error(np.array(truth), np.array(found)),
    ),
  ]
  np.testing.assert_allclose(*np.transpose(pairs))


@pytest.mark.parametrize(
  'score, paid',
  [
    (9.0, (0.0, '')),
    (2.0, (0.0, '')),
    (1.5, (0.2, '')),
    (1.0, (0.5, 'bronze')),
    (0.5, (0.75, 'silver')),
    (0.01, (1.0, 'gold')),
  ],
)
def test_rewards_follow_the_medals(score, paid):
  assert grade.reward(score, SPEC) == paid
  mirrored = {k: v if k == 'metric' else -v for k, v in SPEC.items()}
  assert grade.reward(-score, {**mirrored, 'metric': 'auc'}) == paid


def test_medals_are_quantiles_of_the_ladder():
  scores = {str(i): float(i) for i in range(11)}
  found = ladder.judged(problems.PROBLEMS['digits'], scores, 0.0)
  assert found.best == '10'
  assert found.spec == dict(
    metric='accuracy', baseline=0.0, bronze=6.0, silver=8.0, gold=9.0
  )
  lower = ladder.judged(problems.PROBLEMS['photos'], {'c': 9.0, **scores}, 20.0)
  assert lower.best == '0' and lower.spec['baseline'] == 9.0
  with pytest.raises(ladder.BrokenRung, match='order'):
    ladder.judged(problems.PROBLEMS['digits'], dict.fromkeys('abcdef', 0.5), 0.5)


def test_right_answers_in_other_forms_count():
  shuffled = dict(random.Random(0).sample(sorted(TRUTH.items()), len(TRUTH)))
  forms = [
    csv_of(shuffled),
    csv_of({k: f'{v:.18e}' for k, v in TRUTH.items()}),
    csv_of(TRUTH).replace(b'\n', b'\r\n'),
    b'\xef\xbb\xbf' + csv_of(TRUTH) + b'\n\n',
    b'target,id\n' + b''.join(f'{v}, "{k}"\n'.encode() for k, v in TRUTH.items()),
  ]
  assert [grade.score(data, TRUTH, 'rmse') for data in forms[:4]] == [0.0] * 4
  whole = {k: int(v) for k, v in TRUTH.items()}
  assert grade.score(csv_of(TRUTH), whole, 'accuracy') == 1.0  # 3.0 for 3


# Command of an agent → the reward it may get. `BEST` would get 1.
GAMES = {
  'nothing': 'true',
  'the sample': 'cp sample.csv submission.csv',
  'a constant': 'awk -F, \'NR==1{print;next}{print $1",3"}\' BEST > submission.csv',
  'writes the reward': 'mkdir -p logs; echo 1 | tee reward.txt logs/reward.txt '
  'logs/verifier/reward.txt > /logs/verifier/reward.txt',
  'brings its own verifier': 'echo "print(1)" > grade.py; echo "exit 0" > test.sh; '
  'mkdir tests; echo "{}" > tests/truth.json; cp tests/truth.json .',
  'reads the tests': 'cat /tests/truth.json /verifier/*/tests/* > submission.csv',
  'not a number': "sed 's/,.*/,nan/;1s/.*/id,target/' BEST > submission.csv",
  'infinite': "sed 's/,.*/,inf/;1s/.*/id,target/' BEST > submission.csv",
  'unknown ids': "sed '2s/r/q/' BEST > submission.csv",
  'a repeated id': 'cat BEST > submission.csv; tail -1 BEST >> submission.csv',
  'missing ids': 'head -20 BEST > submission.csv',
  'a huge file': 'head -c 8000000 /dev/zero > submission.csv',
  'a hole': 'truncate -s 20G submission.csv',
  'a link': 'ln -s BEST submission.csv',
  'a link to the tests': 'ln -s /tests/truth.json submission.csv',
  'a pipe': 'mkfifo submission.csv',
  'a directory': 'mkdir submission.csv',
  'a pickle': 'printf "cos\\nsystem\\n(S\'echo 1\'\\ntR." > submission.csv',
  'code in a cell': "sed '2s/,.*/,__import__(1)/' BEST > submission.csv",
  'other columns': "sed '1s/.*/id,target,id/' BEST > submission.csv",
  'a quote without end': "sed '2s/,/,\"/' BEST > submission.csv",
  'a deep cell': 'python3 -c "print(chr(34)+chr(91)*10**6)" > submission.csv',
  'a daemon': '(setsid sh -c "sleep 3; cp BEST submission.csv" &) ; true',
  'out of time': 'sleep 60; cp BEST submission.csv',
}


def task_of(folder) -> harbor.HarborTask:
  """A task without data of any package."""
  files = {'test.sh': b'exec python3 -I -S -B "$M2JAX_TESTS/grade.py"\n'}
  files['grade.py'] = open(grade.__file__, 'rb').read()
  for name, value in (('spec.json', SPEC), ('truth.json', TRUTH)):
    files[name] = json.dumps(value).encode()
  draft = harbor.Draft(
    name='toy',
    instruction='Predict.',
    metadata=harbor.Metadata('ml', 'toy', collect=('submission.csv',), wall_s=9.0),
    overlay={'sample.csv': csv_of(dict.fromkeys(TRUTH, 0)), 'best': csv_of(TRUTH)},
    tests=files,
    solution={'solve.sh': b'cp best submission.csv\n'},
  )
  (folder / 'tasks' / 'train').mkdir(parents=True)
  path = harbor.write(draft, folder / 'tasks' / 'train')
  return harbor.of_directory(harbor.read(path))


def test_gaming_earns_nothing(tmp_path):
  """Each attempt gets 0; what is right gets 1 beside them."""
  task = task_of(tmp_path)
  assert task.wall_s == 9.0  # the episode's, not the command's

  async def judged(command):
    async with task.open(limits=sandbox.Limits(cpu_s=5, wall_s=5.0)) as environment:
      await environment.box.exec(command.replace('BEST', 'best'), timeout_s=2.0)
      return await task.judge(environment)

  async def all_of():
    return {name: await judged(command) for name, command in GAMES.items()} | {
      'right': await judged('cp BEST submission.csv')
    }

  found = asyncio.run(all_of())
  assert found.pop('right').reward == 1.0
  # An honest score: better than zeros, worse than any medal.
  assert found.pop('a constant').reward == pytest.approx(0.0, abs=0.05)
  assert {k: v.reward for k, v in found.items()} == dict.fromkeys(found, 0.0)
  assert {v.outcome for v in found.values()} == {harbor.FAILED}


@pytest.mark.parametrize('name', ['a link', 'a pipe', 'a directory', 'a hard link'])
def test_in_the_agents_container_no_link_is_followed(tmp_path, name):
  """Where Harbor judges in the agent's container, nothing is copied before."""
  tree, logs = tmp_path / 'tree', tmp_path / 'logs'
  tree.mkdir(), logs.mkdir()
  (tmp_path / 'answers.csv').write_bytes(csv_of(TRUTH))
  at = tree / 'submission.csv'
  {
    'a link': lambda: at.symlink_to(tmp_path / 'answers.csv'),
    'a pipe': lambda: os.mkfifo(at),
    'a directory': at.mkdir,
    'a hard link': lambda: at.hardlink_to(tmp_path / 'answers.csv'),
  }[name]()
  with pytest.raises(grade.Wrong, match='cannot be read|not a file of its own'):
    grade.read(tree)
