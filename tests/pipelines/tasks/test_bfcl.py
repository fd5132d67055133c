"""BFCL's multi-turn entries: state, results and turns decide."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from configs import suites as suites_config
from experiments import common
from m2jax import tasks
from m2jax_pipelines import records, suites
from m2jax_pipelines.tasks import bfcl
from m2jax_pipelines.tasks.bfcl import backend, data
from tests.pipelines import model_server

pytest.importorskip('bfcl_eval', reason=data.INSTALL)
NUMBER = 0
SPEC = f'bfcl/train/{NUMBER}'


def _solution(number=NUMBER):
  """The reference calls, turn by turn, with keywords."""
  return [
    [backend._call(text) for text in turn]
    for turn in data.entries()[number]['ground_truth']
  ]


def _play(turns, answer='done') -> float:
  """Plays turns of (name, positional, keywords); None ends without next_request."""

  async def one():
    task = tasks.make(SPEC)
    async with task.open() as environment:
      for number, turn in enumerate(turns):
        if number:
          await environment.execute('next_request', {})
        for name, positional, keywords in turn:
          names = _parameters(task, name)
          arguments = {**dict(zip(names, positional, strict=False)), **keywords}
          try:
            await environment.execute(name, arguments)
          except tasks.BadCall:
            pass
      return await task.verify(environment, answer)

  return asyncio.run(one())


def _parameters(task, name):
  for tool in task.tools:
    if tool['function']['name'] == name:
      return list(tool['function']['parameters']['properties'])
  return []


def test_the_reference_calls_pass():
  assert _play(_solution()) == 1.0


def test_every_reference_passes():
  """The episode judges as BFCL does: an entry that its own solution fails is wrong."""
  for entry in data.entries():
    episode = backend.Episode(entry)
    for turn in entry['ground_truth']:
      for text in turn:
        name, positional, keywords = backend._call(text)
        assert name in episode._names
        shown = episode._agent.run(name, *positional, **keywords)
        episode._results.append(shown)
        episode._calls += 1
      assert episode.end_turn()['valid'], entry['id']


def _without(turn, index):
  turns = _solution()
  del turns[turn][index]
  return turns


def _with(turn, *calls):
  turns = _solution()
  turns[turn] += [(name, [], arguments) for name, arguments in calls]
  return turns


_LOGIN = {'username': 'analyst_pro', 'password': 'Kj8#mP9$vL2'}
CHEATS = {
  'nothing': lambda: [[]],
  'only the turns': lambda: [[], [], [], []],
  'stops after the first turn': lambda: _solution()[:1],
  'stops before the last turn': lambda: _solution()[:3],
  'all in the first turn': lambda: [sum(_solution(), []), [], [], []],
  'last turn empty': lambda: [*_solution()[:3], []],
  'order of turns': lambda: _solution()[::-1],
  'no mkdir': lambda: _without(0, 1),
  'no cd': lambda: _without(0, 0),
  'no mv': lambda: _without(0, 2),
  'no grep': lambda: _without(1, 1),
  'no sort': lambda: _without(2, 0),
  'no diff': lambda: _without(3, 3),
  'a file too many': lambda: _with(0, ('touch', {'file_name': 'x'})),
  'a directory too many': lambda: _with(1, ('mkdir', {'dir_name': 'x'})),
  'a file removed': lambda: _with(3, ('rm', {'file_name': 'final_report.pdf'})),
  'content changed': lambda: _with(
    3, ('echo', {'content': 'x', 'file_name': 'final_report.pdf'})
  ),
  'a login too many': lambda: _with(2, ('authenticate_twitter', _LOGIN)),
  'private method': lambda: [[('_load_scenario', [], {'scenario': {}})], [], [], []],
  'dunder': lambda: [[('__init__', [], {})], [], [], []],
  'excluded tool': lambda: [
    [('cp', [], {'source': 'a', 'destination': 'b'})],
    [],
    [],
    [],
  ],
  'unknown tool': lambda: [[('eval', [], {'text': '1'})], [], [], []],
}


@pytest.mark.parametrize('name', CHEATS)
def test_the_verifier_cannot_be_gamed(name):
  """A turn's state and results decide, however they are claimed."""
  assert _play(CHEATS[name](), answer='All done, every check passed.') == 0.0


def _offers(number, name) -> bool:
  tools = data.tools(data.entries()[number])
  return name in [tool['function']['name'] for tool in tools]


def _mathematical() -> int:
  """An entry whose tools can be asked for a logarithm."""
  return next(number for number in range(100) if _offers(number, 'logarithm'))


SLOW = 'more digits than there is time for'
BAD = {
  SLOW: {'value': 3, 'base': 2, 'precision': 10**8},
  'a number that is too long': {'value': 10**5000, 'base': 2, 'precision': 3},
  'not a number': {'value': float('nan'), 'base': [], 'precision': {}},
  'nested too deeply': {'value': eval('[' * 90 + ']' * 90), 'base': 2, 'precision': 3},
  'other names': {'self': 1, 'name': 2, '': 3},
}


@pytest.mark.parametrize(
  'name', [pytest.param(SLOW, marks=pytest.mark.long), *list(BAD)[1:]]
)
def test_a_bad_call_is_an_error_of_that_call(name):
  """The tools go on, and the turn can still be solved."""
  number = _mathematical()

  async def one():
    task = tasks.make(f'bfcl/train/{number}')
    async with task.open() as environment:
      try:
        shown = await environment.execute('logarithm', BAD[name])
      except tasks.BadCall as error:
        shown = f'error: {error}'
      assert 'error' in shown.lower(), shown
      return json.loads(await environment.execute('mean', {'numbers': [1, 2, 6]}))

  assert asyncio.run(one()) == {'result': 3.0}


@pytest.mark.filterwarnings('ignore:os.fork')
def test_a_call_ends_within_its_limits(monkeypatch):
  monkeypatch.setattr(backend, '_MAX_SHOWN', 5)
  assert backend.within_limits(lambda: 'short')
  assert not backend.within_limits(lambda: 'longer')
  monkeypatch.setattr(backend, '_CALL_S', 0.1)
  assert not backend.within_limits(lambda: time.sleep(9) or '')


def _evaluated(path, name, calls):
  """The record of one attempt at an entry with the tool `name`, by the suite `bfcl`.

  Args:
    path: file of the records.
    name: the tool.
    calls: entry number → calls (name, arguments) of the model, before it answers.
  """

  def number_of(seed):
    return int(bfcl.spec('held_out', 0, seed, bfcl.Config()).rpartition('/')[2])

  seed = next(seed for seed in range(1000) if _offers(number_of(seed), name))
  values = suites_config.get_config('bfcl').suite
  values.update(count=1, trials=1, seed=seed)
  config = common.build(suites.SuiteConfig, values)
  script = calls(number_of(seed))

  def answer(body):
    done = sum(message['role'] == 'tool' for message in body['messages'])
    if done >= len(script):
      return 'done'
    function = {'name': script[done][0], 'arguments': json.dumps(script[done][1])}
    call = {'id': f'c{done}', 'type': 'function', 'function': function}
    return {'content': '', 'tool_calls': [call]}

  with model_server.Server(answer) as server:
    asyncio.run(suites.run(config, server.url, 'm', path))
  [row] = records.read(path)
  return row


def _script(number):
  """The reference calls of an entry and the ends of its turns, as a model has them."""
  task, script = tasks.make(f'bfcl/held_out/{number}'), []
  for turn in _solution(number):
    for name, positional, keywords in turn:
      names = _parameters(task, name)
      script.append((name, {**dict(zip(names, positional, strict=False)), **keywords}))
    script.append(('next_request', {}))
  return script[:-1]


@pytest.mark.long
def test_a_call_without_end_costs_an_evaluation_that_call_only(tmp_path):
  """Through suite, agent and server: the reference calls after it are still right."""
  endless = 'logarithm', BAD['more digits than there is time for']
  path = tmp_path / 'a.jsonl'
  row = _evaluated(path, 'logarithm', lambda number: [endless, *_script(number)])
  assert (row['outcome'], row['success']) == ('judged', 1.0), row['error']
  shown = [m['content'] for m in row['messages'] if m['role'] == 'tool']
  assert 'too much time or memory' in shown[0]


def test_calls_without_end_are_a_judged_failure(tmp_path):
  """An attempt has 20 messages for each turn, and one to answer; who spends them all
  on calls has failed."""
  mean = 'mean', {'numbers': [1, 2, 6]}
  row = _evaluated(tmp_path / 'a.jsonl', 'mean', lambda number: [mean] * 1000)
  turns = len(tasks.make(row['task']).requests)
  assert (row['outcome'], row['success']) == ('judged', 0.0)
  assert (row['end_reason'], row['tool_calls']) == ('max_turns', 20 * turns + 1)


def test_a_backend_that_died_is_a_failed_attempt(monkeypatch):
  """No exception: one attempt would end the whole suite."""

  started, start = [], asyncio.create_subprocess_exec

  async def noted(*command, **options):
    started.append(await start(*command, **options))
    return started[-1]

  monkeypatch.setattr(asyncio, 'create_subprocess_exec', noted)

  async def one():
    task = tasks.make(SPEC)
    async with task.open() as environment:
      for _ in task.requests[1:]:
        await environment.execute('next_request', {})
      started[0].kill()
      await started[0].wait()
      with pytest.raises(tasks.BadCall):
        await environment.execute('ls', {})
      return await task.verify(environment, 'done')

  assert asyncio.run(one()) == 0.0


def test_a_call_after_the_end_changes_no_verdict():
  async def one():
    task = tasks.make(SPEC)
    async with task.open() as environment:
      for _ in task.requests:
        await environment.execute('next_request', {})
      with pytest.raises(tasks.BadCall, match='no further'):
        await environment.execute('ls', {})
      return await task.verify(environment, '')

  assert asyncio.run(one()) == 0.0


def test_tools_are_json_schemas():
  """BFCL's own type names would be refused by a server."""
  shown = json.dumps(tasks.make(SPEC).tools)
  for word in ('"dict"', '"float"', '"tuple"', '"any"'):
    assert f'"type": {word}' not in shown
