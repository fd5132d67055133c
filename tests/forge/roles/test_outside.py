"""Episodes that agents anywhere begin and end over HTTP."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import pytest

from m2jax.forge.config import RecordedConfig
from m2jax.forge.roles.outside import Leased, Recorded
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.pool import atif, jsonl, leases
from m2jax.pool.data_pool import DataPool
from m2jax.records import WorkItem
from m2jax.tasks import terminal
from tests.gateway.conftest import response_text
from tests.gateway.scripted_engine import ScriptedEngine

SPEC = terminal.spec('train', 0, family='steps_1')


class Client:
  """Calls of who judges the agents, with the secret unless another key is given."""

  def __init__(self, base_url):
    self._base_url = base_url

  def post(self, path, body, key='secret'):
    headers = {'authorization': f'Bearer {key}'}
    data = json.dumps(body).encode()  # a lone surrogate as an escape
    return httpx.post(self._base_url + path, headers=headers, content=data)

  def end(self, episode, key='secret', **fields):
    return self.post('/episodes/end', {'key': episode, **fields}, key)

  def chat(self, key):
    messages = [{'role': 'user', 'content': 'hi'}]
    body = {'model': 'm2jax', 'messages': messages}
    return self.post('/chat/completions', body, key).status_code


@pytest.fixture
def pool(tmp_path):
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    yield pool


@pytest.fixture
def start(tok, pool):
  """start(make): a client of a gateway whose episodes are make(sessions)."""
  with contextlib.ExitStack() as stack:

    def start(make, **config):
      engine = ScriptedEngine(lambda request: tok.encode(response_text('so', 'yes')))
      stack.callback(engine.close)
      config = GatewayConfig(**config)
      gateway = Gateway(config, tok, engine, pool.record_completion)
      gateway.take_episodes(make(gateway.sessions), 'secret')
      stack.enter_context(gateway)
      return Client(gateway.base_url)

    yield start


def test_an_episode_and_its_reward_are_recorded(start, pool):
  """Neither its own key nor another pays it; afterwards it is of no use."""
  client = start(lambda sessions: Recorded(pool, sessions))
  assert client.post('/episodes', {'task': 'x'}, key='guess').status_code == 401
  begun = client.post('/episodes', {'task': 'mine/1'})
  assert begun.status_code == 201
  key = begun.json()['key']
  assert [client.chat(key), client.chat(key)] == [200, 200]
  for wrong in ('guess', key):
    assert client.end(key, wrong, success=1).status_code == 401
  done = client.end(key, success=0.5, end_reason='exit', error='e')
  assert done.status_code == 200
  assert client.chat(key) == 401
  assert client.end(key, success=1.0).status_code == 404
  pool.flush()
  [stored] = pool.sample_trajectories(9, seed=0, evaluation=True)
  t = stored.trajectory
  assert (t.task, t.family, t.success) == ('mine/1', 'mine', 0.5)
  assert (t.end_reason, t.error, t.item) == ('exit', 'e', -1)
  assert t.session.startswith('episode-') and t.session != key
  assert len(pool.turns(t.session)) == 2


def test_turns_are_paid_by_the_ids_of_their_responses(start, pool):
  """In every dialect. A reward of no response of the episode leaves it open."""
  client = start(lambda sessions: Recorded(pool, sessions))
  key = client.post('/episodes', {'task': 'mine/1'}).json()['key']
  message = {'role': 'user', 'content': 'hi'}
  ids = [
    client.post(path, {'model': 'm2jax'} | body, key).json()['id']
    for path, body in (
      ('/chat/completions', {'messages': [message]}),
      ('/messages', {'messages': [message], 'max_tokens': 9}),
      ('/responses', {'input': 'hi', 'store': False}),
    )
  ]
  stray = client.end(key, success=1.0, rewards={ids[0] + 'x': 1})
  assert stray.status_code == 400 and f'no response {ids[0]}x' in stray.text
  earned = dict(zip(ids, (0.5, -1, 2), strict=True))
  done = client.end(key, success=1.0, rewards=earned)
  assert done.status_code == 200
  pool.flush()
  [stored] = pool.sample_trajectories(9, seed=0, evaluation=True)
  recorded = pool.completions(stored.trajectory.session)
  assert stored.trajectory.rewards == dict(
    zip([c.id for c in recorded], (0.5, -1.0, 2.0), strict=True)
  )


def test_no_key_is_stored(start, pool, tmp_path):
  """Neither of clients nor of episodes: not in the database, its log or an export."""
  client = start(lambda sessions: Recorded(pool, sessions), accept_unknown_keys=True)
  keys = ['sk-a-key-of-a-client', 'sk-another-one']
  for key in (*keys, keys[0]):
    assert client.chat(key) == 200
  begun = client.post('/episodes', {'task': 'a/b'}).json()
  keys.append(begun['key'])
  assert client.chat(keys[2]) == 200
  done = client.end(keys[2], success=1.0)
  assert done.status_code == 200
  pool.flush()
  files = [path for path in tmp_path.rglob('*') if path.is_file()]
  assert any(path.name.endswith('-wal') for path in files)
  stored = pool.sample_trajectories(9, seed=0, evaluation=True)
  documents = [
    atif.document(s.trajectory, pool.completions(s.trajectory.session)) for s in stored
  ]
  exported = [*jsonl.lines(pool._database), json.dumps(documents)]
  texts = [path.read_bytes() for path in files] + [x.encode() for x in exported]
  assert b'episode-' in b''.join(texts) and b'client-' in b''.join(texts)
  for key in keys:
    assert not any(key.encode() in text for text in texts)
    assert not any(key.partition('-')[2].encode() in text for text in texts)
  # Requests of one key are one session still, and those of two keys are two.
  names = [json.loads(x)['session'] for x in exported[:-1] if '"completion"' in x]
  assert len(names) == 4 and len(set(names)) == 3


def test_what_is_idle_or_too_much_ends(start, pool):
  """An episode that nobody goes on with is no reward of 0; its key is of no use."""
  made = []

  def make(sessions):
    config = RecordedConfig(max_open=2, idle_s=1.0, keep_sessions=3)
    made.append((Recorded(pool, sessions, config), sessions))
    return made[0][0]

  client = start(make, accept_unknown_keys=True)
  [(recorded, sessions)] = made
  keys = [client.post('/episodes', {'task': 'a'}).json()['key'] for _ in range(2)]
  full = client.post('/episodes', {'task': 'a'})
  assert full.status_code == 503 and '2 episodes' in full.text
  assert full.headers['retry-after'].isdecimal()
  assert client.chat(keys[0]) == client.chat('mine') == 200
  time.sleep(1.1)
  assert client.chat(keys[1]) == 200
  recorded.clean()
  assert len(sessions) == 1  # the second episode's
  assert client.end(keys[0], success=1.0).status_code == 404
  assert client.end(keys[1], success=1.0).status_code == 200
  for i in range(4):
    client.chat(f'more{i}')
  recorded.clean()
  pool.flush()
  stored = {s.trajectory.session: s for s in pool.each_trajectory()}
  rows = [json.loads(line) for line in jsonl.lines(pool._database)]
  names = {row['session'] for row in rows if row['kind'] == 'completion'}
  assert len(names) == 3 and not names & stored.keys()


@pytest.mark.parametrize(
  'body, named',
  [
    ({}, 'success'),
    ({'success': True}, 'success'),
    ({'success': 1.5}, 'success'),
    ({'success': '1'}, 'success'),
    ({'success': 1, 'end_reason': 'won'}, 'end_reason'),
    ({'success': 1, 'answer': 7}, 'answer'),
    ({'success': 1, 'rewards': [1]}, 'rewards'),
    ({'success': 1, 'rewards': {'a': '1'}}, 'rewards.a'),
    ({'success': 1, 'rewards': {'a': 10**400}}, 'rewards.a'),
    ({'success': 1, 'rewards': {'a': 1.0}}, 'no response a'),
    ({'success': 1, 'key': 7}, 'key'),
    ({'success': 1, 'answer': '\ud800'}, 'answer'),
    ([], 'object'),
  ],
)
def test_bad_ends_name_the_field_and_leave_the_episode_open(start, pool, body, named):
  client = start(lambda sessions: Recorded(pool, sessions))
  assert 'name the task' in client.post('/episodes', {}).text
  assert client.post('/episodes', {'task': '\ud800'}).status_code == 400
  key = client.post('/episodes', {'task': 'a'}).json()['key']
  bad = client.post('/episodes/end', {'key': key} | body if body != [] else body)
  assert bad.status_code == 400 and named in bad.text
  assert client.chat(key) == 200


def start_leased(start, pool, **limits):
  """A client of a gateway that hands out the pool's items, and its `Leased`."""
  made = []

  def make(sessions):
    made.append(Leased(pool, sessions, **limits))
    return made[0]

  return start(make), made[0]


def test_a_run_s_items_are_handed_out_and_reported(start, pool):
  """Each episode of the group goes to one caller; the report comes with the last."""
  pool.submit(WorkItem(0, SPEC, 2))
  client, leased = start_leased(start, pool, lease_s=60.0, max_age_s=60.0)
  assert 'leave it out' in client.post('/episodes', {'task': 'mine'}).text
  begun = [client.post('/episodes', {}).json() for _ in range(2)]
  assert client.post('/episodes', {}).status_code == 503
  assert {b['task'] for b in begun} == {SPEC}
  assert {b['instruction'] for b in begun} == {terminal.make(SPEC).instruction}
  keys = [b['key'] for b in begun]
  assert len(set(keys)) == 2
  for key, success in zip(keys, (1.0, 0.0), strict=True):
    assert client.chat(key) == 200
    [lease] = pool.open_leases()
    assert lease.report is None
    assert client.end(key, success=success).status_code == 200
  [lease] = pool.open_leases()
  assert lease.report == leases.COMPLETE and leased.reported == 1
  pool.complete(0)
  group = pool.group(0)
  assert [(t.rank, t.success) for t, _ in group] == [(0, 1.0), (1, 0.0)]
  names = [t.session for t, _ in group]
  assert all(name.startswith('rl-0-0-') for name in names) and not {*names} & {*keys}
  assert [len(completions) for _, completions in group] == [1, 1]


def test_episodes_that_nobody_ends_are_given_back(start, pool):
  """Law 5: not a reward of 0; the item goes to others."""
  pool.submit(WorkItem(0, SPEC, 1))
  client, leased = start_leased(start, pool, lease_s=0.2, max_age_s=0.1)
  with leased:
    key = client.post('/episodes', {}).json()['key']
    deadline = time.monotonic() + 20
    while not leased.reported:
      assert time.monotonic() < deadline
      time.sleep(0.02)
  [lease] = pool.open_leases()
  assert lease.report == leases.AGAIN + 'nobody ended the episode within 0.1 s'
  assert client.end(key, success=1.0).status_code == 404
  assert client.chat(key) == 401


def test_a_gateway_that_stops_gives_its_groups_back(start, pool):
  pool.submit(WorkItem(0, SPEC, 2))
  client, leased = start_leased(start, pool, lease_s=60.0, max_age_s=60.0)
  with leased:
    client.post('/episodes', {})
  [lease] = pool.open_leases()
  assert lease.report == leases.STOPPED + 'the gateway'
