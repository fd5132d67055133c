"""The API: pages, conditions, annotations, and whom it answers."""

from __future__ import annotations

import json

import httpx
import pytest

from m2jax.pool.pages import Condition
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
    ('/view/api/list?before=99999999999999999999', {}, 400),
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
