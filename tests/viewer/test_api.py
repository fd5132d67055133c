"""The API: pages, conditions, annotations, and whom it answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys

import httpx
import pytest

from m2jax import records
from m2jax.pool.data_pool import DataPool
from m2jax.pool.pages import LISTED, MORE, Condition
from m2jax.viewer.run import Run
from tests.viewer import conftest


@pytest.fixture
def client(link):
  base, _, key = link.partition('/view#key=')
  headers = {'Authorization': f'Bearer {key}'}
  with httpx.Client(base_url=base, headers=headers) as client:
    yield client


def listed(client, **params):
  response = client.get('/view/api/list', params=params)
  assert response.status_code == 200, response.text
  return [row[1] for row in response.json()['rows']]


@pytest.mark.parametrize(
  'params, sessions',
  [
    ({}, ['s2.0', 's2.1', 's1.0', 's1.1', 's0.0', 's0.1']),
    ({'phase': 'eval'}, ['e0']),
    ({'outcome': 'success'}, ['s2.1', 's1.1', 's0.1']),
    ({'family': 'find', 'most_s': '1'}, ['s0.0', 's0.1']),
    ({'least_s': '2'}, ['s2.0', 's2.1']),
    ({'end_reason': 'max_turns'}, []),
    ({'text': 'ONERROR'}, ['s1.0', 's1.1']),
    ({'text': 'seen by s0.1'}, ['s0.1']),
    ({'text': 'held', 'phase': 'eval'}, ['e0']),
    ({'before': '1'}, ['s0.0', 's0.1']),
    ({'rows': '3-5'}, ['s2.0', 's1.0', 's1.1']),
    ({'step': '1'}, ['s1.0', 's1.1', 's0.0', 's0.1']),
    ({'step': '2'}, []),
    ({'least_reward': '0.5'}, ['s1.1', 's0.1']),
    ({'most_reward': '1'}, ['s1.0', 's0.0']),  # the upper bound is excluded
    ({'least_reward': '1', 'phase': 'eval'}, ['e0']),
    ({'flag': 'any'}, []),
  ],
)
def test_conditions(client, params, sessions):
  """Each parameter leaves what it says, newest group first, and they combine."""
  assert listed(client, **params) == sessions


@pytest.mark.parametrize('text', ['', 'a task'])
def test_pages_have_everything_once(run, text):
  """Pages of one item join to the whole list, with a search in text too."""
  sessions, before, pages = [], None, 0
  while pages < 10:
    page = run.reader.page(Condition(text=text), before, n=1)
    sessions += [row[1] for row in page.rows]
    pages, before = pages + 1, page.before
    if before is None:
      break
  every = [f's{i}.{r}' for i in (2, 1, 0) for r in range(2)]
  assert sessions == [s for s in every if not text or s[1] != '1']


def rows(run, **where):
  """The rows of a page as dicts."""
  page = run.reader.page(Condition(**where))
  return [dict(zip([*LISTED, *MORE], row, strict=False)) for row in page.rows]


def test_rows_say_what_the_task_asks(tmp_path):
  """The beginning of the first user message on one line, in evaluations too."""
  long = 'Count the lines\n of ' + 200 * 'x'
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    conftest.add_group(pool, 0, text=long)
    pool.add_trajectory(conftest.trajectory('e0', -1, 0, text='unlike'))
    pool.flush()
    with contextlib.closing(Run(tmp_path)) as run:
      expected = ' '.join(long.split())[:120] + '…'
      assert [r['instruction'] for r in rows(run)] == [expected] * 2
      (bundled,) = run.bundles.session('s0.1')['trajectories']
      assert bundled['instruction'] == ' '.join(long.split())


def test_a_search_says_where_it_found_its_text(run):
  """With what is around it, in whatever case; nothing else says so."""
  (found,) = rows(run, text='SEEN BY S0.1')
  assert 'seen by s0.1' in found['hit'] and found['hit'].startswith('…')
  assert not any('hit' in row for row in rows(run))


def test_groups_without_a_trajectory_are_counted_only(tmp_path):
  """Of those that are pending; the last trained group is known."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    conftest.add_group(pool, 0, step=3)
    conftest.add_group(pool, 1)
    for index in range(2, 5):
      pool.submit(records.WorkItem(index, 'a/spec', 2))
    pool.flush()
    with contextlib.closing(Run(tmp_path)) as run:
      assert [item[0] for item in run.reader.page(Condition()).items] == [1, 0]
      summary = run.summary()
      assert summary['waiting'] == 3 and summary['trained'] == 0


JOB = """
import dataclasses, pathlib, sys
from m2jax.train import workdir
path = pathlib.Path(sys.argv[1])
workdir.open_workdir(dataclasses.make_dataclass('Config', [])(), path)
print(workdir.in_use(path), flush=True)
input()
"""


def test_the_status_is_that_of_the_job(tmp_path):
  """Live only while it runs, also if the page is its own; then stopped or finished."""
  DataPool(f'sqlite:///{tmp_path}/pool.db').close()
  with contextlib.closing(Run(tmp_path)) as run:
    status = lambda: run.summary()['status']
    assert status() == ''  # no job that locks its workdir
    command = sys.executable, '-c', JOB, tmp_path
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as job:
      assert job.stdout.readline() == 'True\n'
      assert status() == status() == 'live'
      job.kill()
    assert status() == 'stopped'
    (tmp_path / 'report.html').touch()
    assert status() == 'finished'


def test_stages_are_the_rows_before_their_records(tmp_path):
  """A job writes trajectories of an evaluation, then its record; that of the last one
  may be missing. The page of a stage has its trajectories only."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    add = lambda *args, **more: conftest.add_evaluation(pool, tmp_path, *args, **more)
    with contextlib.closing(Run(tmp_path)) as run:
      assert run.summary()['stages'] == []
      add('after SFT', ['e0', 'e1'], 1000.0)
      conftest.add_group(pool, 0)
      add('after RL', ['e2'], 2000.0)
      add('after RL', ['e3'], 3000.0, temperature=0.0)
      pool.add_trajectory(conftest.trajectory('e4', -1, 0))
      pool.flush()
      found = {name: span for name, *span in run.summary()['stages']}
      listed = {
        name: [r['session'] for r in rows(run, phase='eval', first_row=a, last_row=b)]
        for name, (a, b) in found.items()
      }
  assert listed == {
    'after SFT, step 4, dev, temperature 1': ['e1', 'e0'],
    'after RL, step 4, dev, temperature 1': ['e2'],
    'after RL, step 4, dev, temperature 0': ['e3'],
  }


@pytest.mark.parametrize(
  'path, headers, status',
  [
    ('/view/api/run', {'Authorization': 'Bearer wrong'}, 401),
    ('/view/api/run', {'Authorization': ''}, 401),
    ('/view/api/run', {'Host': 'evil.example'}, 403),
    ('/view', {'Host': 'evil.example:80'}, 403),
    ('/view/api/run', {'Host': 'localhost:1234'}, 200),
    ('/view/api/list?phase=no', {}, 400),
    ('/view/api/list?limit=5', {}, 400),
    ('/view/api/list?before=x', {}, 400),
    ('/view/api/list?rows=1', {}, 400),
    ('/view/api/list?before=99999999999999999999', {}, 400),
    ('/view/api/list?step=-1', {}, 400),
    ('/view/api/list?least_reward=nan', {}, 400),
    ('/view/api/list?most_reward=x', {}, 400),
    ('/view/api/list?flag=no', {}, 400),
    ('/view/api/histogram?phase=no', {}, 400),
    ('/view/api/histogram?before=1', {}, 400),
    ('/view/api/histogram', {'Host': 'evil.example'}, 403),
    ('/view/api/curves', {'Authorization': ''}, 401),
    ('/view/api/curves?path=/etc/passwd', {}, 400),
    ('/view/api/findings', {'Authorization': ''}, 401),
    ('/view/api/findings?path=/etc/passwd', {}, 400),
    ('/view/api/run?run=other', {}, 404),
    ('/view/api/run?run=/etc', {}, 400),
    ('/view/api/tasks?run=other', {}, 404),
    ('/view/api/tasks', {'Authorization': ''}, 401),
    ('/view/api/task?task=' + 10_001 * 'x', {}, 400),
    ('/view/api/group/-1', {}, 400),
    ('/view/api/group/99', {}, 404),
    ('/view/api/session/none', {}, 404),
    ('/elsewhere', {}, 404),
  ],
)
def test_who_is_answered_and_what(client, path, headers, status):
  """Wrong keys, foreign hosts and unknown names get an error, and nothing else."""
  response = client.get(path, headers=headers)
  assert response.status_code == status, response.text
  assert status == 200 or set(response.json()) == {'error'}


def test_the_page_has_nothing_of_the_run_and_a_strict_policy(client):
  """It needs no key, so it must not show anything; scripts only by their hash."""
  response = client.get('/view', headers={'Authorization': ''})
  assert response.status_code == 200 and 's0.0' not in response.text
  policy = response.headers['content-security-policy']
  assert "default-src 'none'" in policy and "connect-src 'self'" in policy
  assert 'unsafe' not in policy and '*' not in policy


def test_annotations_are_appended(client, workdir):
  """A note is there for its trajectory only; the file keeps every line."""
  path = '/view/api/annotations/s0.0'
  before = client.get(path).json()
  notes = [{'text': 'first'}, {'text': '<b>second</b>', 'completion': 's0.0-1'}]
  for note in notes:
    assert client.post(path, json=note).status_code == 200
  found = client.get(path).json()[len(before) :]
  assert [n['text'] for n in found] == ['first', '<b>second</b>']
  assert client.get('/view/api/annotations/s0.1').json() == []
  lines = (workdir / 'annotations.jsonl').read_text().splitlines()
  assert [json.loads(line)['text'] for line in lines[-2:]] == [
    'first',
    notes[1]['text'],
  ]


@pytest.mark.parametrize(
  'session, body, status',
  [
    ('s0.0', {}, 400),
    ('s0.0', {'text': ' '}, 400),
    ('s0.0', {'text': 'x' * 10_001}, 400),
    ('s0.0', {'text': 'x' * 100_000}, 413),
    ('s0.0', {'text': 'x', 'session': 's0.1'}, 400),
    ('s0.0', {'text': 'x', 'token': -1}, 400),
    ('none', {'text': 'x'}, 404),
    ('s0.0', {'flag': 'cheated', 'on': True}, 400),
    ('s0.0', {'flag': ['hacked'], 'on': True}, 400),
    ('s0.0', {'flag': 'hacked'}, 400),
    ('s0.0', {'flag': 'hacked', 'on': 1}, 400),
    ('s0.0', {'flag': 'hacked', 'on': True, 'text': 'x'}, 400),
    ('none', {'flag': 'hacked', 'on': True}, 404),
  ],
)
def test_bad_notes(client, workdir, session, body, status):
  """A note that is refused leaves no line."""
  file = workdir / 'annotations.jsonl'
  before = file.read_text() if file.exists() else ''
  response = client.post(f'/view/api/annotations/{session}', json=body)
  assert response.status_code == status, response.text
  assert (file.read_text() if file.exists() else '') == before


def test_token_values_are_checked(run):
  """Only known names, only numbers."""
  with pytest.raises(ValueError, match='name'):
    run.annotations.tokens('s2.1', 's2.1-0', 'surprise', 1, [0.0])
  with pytest.raises(ValueError, match='not finite'):
    run.annotations.tokens('s2.1', 's2.1-0', 'entropy', 1, [float('nan')])


def test_the_summary_counts_each_trajectory_once(run):
  """However often pages ask for it; and it has no secret."""
  counted = sum(kind[-1] for kind in run.summary()['kinds'])
  assert counted == sum(kind[-1] for kind in run.summary()['kinds']) == 7
  assert run.summary()['states'] == {'pending': 1, 'taken': 2}
  assert conftest.KEY not in json.dumps(run.summary())


def flag(client, session, name, on):
  path = f'/view/api/annotations/{session}'
  response = client.post(path, json={'flag': name, 'on': on})
  assert response.status_code == 200, response.text


def test_a_flag_is_set_and_removed(client, workdir):
  """The last record decides; each is a line of its own, and the list filters by it."""
  flag(client, 's1.0', 'hacked', True)
  flag(client, 's0.1', 'look', True)
  flag(client, 's0.1', 'hacked', True)
  flagged = lambda: client.get('/view/api/run').json()['flagged']
  assert flagged() == {'s1.0': ['hacked'], 's0.1': ['hacked', 'look']}
  assert listed(client, flag='hacked') == ['s1.0', 's0.1']
  assert listed(client, flag='hacked', phase='eval') == []
  flag(client, 's1.0', 'hacked', False)
  assert flagged() == {'s0.1': ['hacked', 'look']}
  assert listed(client, flag='hacked') == listed(client, flag='any') == ['s0.1']
  for name in 'look', 'hacked':
    flag(client, 's0.1', name, False)
  assert flagged() == {} and listed(client, flag='any') == []
  lines = (workdir / 'annotations.jsonl').read_text().splitlines()
  found = [json.loads(line) for line in lines]
  assert [n['on'] for n in found if n['kind'] == 'flag'] == [True] * 3 + [False] * 3


def test_flags_need_the_key(client):
  """And the server's own Host."""
  body = {'flag': 'hacked', 'on': True}
  post = lambda **headers: client.post(
    '/view/api/annotations/s0.0', json=body, headers=headers
  )
  assert post(Authorization='').status_code == 401
  assert post(Host='evil.example').status_code == 403
  assert client.get('/view/api/run').json()['flagged'] == {}


def test_rewards_are_counted(client):
  """Under the other conditions, without those on the reward itself; an evaluation has
  a verdict only, and one value is one edge."""
  get = lambda **given: client.get('/view/api/histogram', params=given).json()
  found = get(least_reward='0.5')
  assert found['edges'] == [i / 10 for i in range(11)]
  assert found['counts'] == [2, *[0] * 8, 2]
  assert get(family='find')['counts'] == [1, *[0] * 8, 1]
  assert get(step='9')['counts'] == [0] * 10
  assert get(phase='eval') == {'edges': [1.0], 'counts': []}


def write_metrics(workdir, *found):
  lines = [
    json.dumps({'schema': 1, 'lineage': 0, 'time_s': 1.0, **record}) for record in found
  ]
  (workdir / 'metrics.jsonl').write_text('\n'.join([*lines, '']))


@pytest.fixture
def opened(tmp_path):
  """A run without trajectories, whose metrics are still to be written."""
  DataPool(f'sqlite:///{tmp_path}/pool.db').close()
  with contextlib.closing(Run(tmp_path)) as run:
    yield run


def rl(step, **fields):
  return {'phase': 'rl', 'step': step, **fields}


def test_curves_have_numbers_only(opened, tmp_path):
  """What is not finite, no number or missing is null, as JSON has no NaN."""
  of = dict(phase='eval', step=4, stage='after RL', split='dev', family='all')
  write_metrics(
    tmp_path,
    *(rl(1, reward=0.5, success=1), rl(2, reward=None, success=float('nan'))),
    *(rl(3, reward='<b>', success=float('inf')), rl('x', reward=1.0), rl(4)),
    *({**of, 'successes': 3.0, 'n': 4}, {**of, 'successes': 3.0, 'n': 0}),
    {**of, 'successes': 1, 'n': 2, 'temperature': 'hot'},
    {**of, 'successes': 1, 'n': 2, 'family': 'find'},
  )
  found = opened.curves()
  assert found['rl'] == [[1, 0.5, 1.0], *([i, None, None] for i in (2, 3, 4))]
  assert found['eval'] == [['after RL, step 4, dev, temperature 1', 0.75, 4]]
  json.dumps(found, allow_nan=False)
  assert opened.summary()['stages'] == []


def test_curves_are_bounded(opened, tmp_path, monkeypatch):
  """Of many steps some are there, the last among them; a file that is too large or
  damaged is named, and not shown in part."""
  assert opened.curves()['rl'] == []
  write_metrics(tmp_path, *(rl(step, reward=0.0) for step in range(1, 1202)))
  found = opened.curves()
  assert found['every'] == 3 and len(found['rl']) == 401
  assert [step for step, *_ in found['rl']] == [*range(1, 1202, 3)]
  monkeypatch.setattr('m2jax.viewer.run._METRICS_BYTES', 1000)
  assert 'larger than' in opened.curves()['problem'] and not opened.curves()['rl']
  (tmp_path / 'metrics.jsonl').write_text('{"schema": 1}\n[[[\n')
  assert 'line 1' in opened.curves()['problem']


def test_tasks_have_their_mean_verdict(tmp_path):
  """Without what was superseded, or failed for infrastructure; of a part of the run."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    conftest.add_group(pool, 0)
    failed = conftest.trajectory('f', -1, 0)
    pool.add_trajectory(dataclasses.replace(failed, end_reason='infrastructure'))
    for i, success in enumerate((0.0, 0.0, 1.0)):
      pool.add_trajectory(conftest.trajectory(f'e{i}', -1, 0, success))
    pool.flush()
    with contextlib.closing(Run(tmp_path)) as run:
      evaluated = Condition('eval')
      assert run.reader.tasks(Condition()) == [['a/spec', 'find', 2, 0.5]]
      assert run.reader.tasks(evaluated) == [
        ['a/spec', 'find', 3, pytest.approx(1 / 3)]
      ]
      assert run.reader.of_task(evaluated, 'a/spec', 2) == ['e2', 'e1']
      assert run.reader.of_task(evaluated, 'other', 2) == []


def test_findings_with_what_the_records_have(opened, tmp_path):
  """More points than their own evidence; of records that cannot be read, that."""
  assert opened.findings() == [] and opened.summary()['findings'] == 0
  write_metrics(tmp_path, *(rl(i, grad_norm=float(i)) for i in range(1, 21)))
  evidence = {'name': 'grad_norm', 'steps': [9, 10], 'values': [9.0, 1e999]}
  found = {'kind': 'gradient_jump', 'phase': 'rl', 'evidence': [evidence]}
  (tmp_path / 'findings.json').write_text(json.dumps([found, {'no': 'finding'}]))
  (shown,) = opened.findings()
  assert shown['curves'][0]['points'] == tuple((i, float(i)) for i in range(1, 21))
  assert opened.summary()['findings'] == 1
  (tmp_path / 'metrics.jsonl').write_text('[[[\n')
  assert opened.findings()[0]['curves'][0]['points'] == ((9, 9.0),)
  json.dumps(opened.findings(), allow_nan=False)
