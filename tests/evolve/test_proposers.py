"""Proposers: what they propose, what they see, and answers that are none."""

import dataclasses
import json
import random

import pytest

from m2jax.checks import InvalidSetting
from m2jax.evolve import chat_model, lineage, proposers, record, scaffold
from m2jax.evolve.proposers import Attempt, ProposerFailed, View, model
from tests.evolve import simulated
from tests.evolve.simulated import START
from tests.pipelines import model_server

BOUNDS = scaffold.narrowed([('max_tokens', 16, 192)])


def view(number=1, **changes):
  start = Attempt(0, None, START.values, {}, 0.4, 0.0, 'start', '')
  failure = {'score': 0.0, 'end_reason': 'length', 'text': 'user: hm\nassistant: no'}
  tools = [{'name': 'sh', 'description': 'Run.'}]
  seed = random.Random(number).getrandbits(48)
  found = View(number, seed, START, 0, BOUNDS, tools, [start], [failure], 'none yet')
  return dataclasses.replace(found, **changes)


@pytest.mark.parametrize('kind', ['random_search', 'tpe'])
def test_proposals_are_a_function_of_the_view(kind):
  """Within the bounds, and never nothing for many rounds."""
  if kind == 'tpe':
    pytest.importorskip('optuna')
  proposer = proposers.make(proposers.ProposerConfig.of_kind(kind)())
  changed = 0
  for number in range(1, 11 if kind == 'tpe' else 60):
    changes = proposer.propose(view(number)).changes
    assert changes == proposer.propose(view(number)).changes
    assert not scaffold.problems(START.changed(changes).values, BOUNDS), changes
    changed += bool(changes)
  assert changed >= 0.8 * (number - 1)


def test_tpe_follows_the_scores():
  """After trials in which a cool temperature is good, it proposes cool ones."""
  pytest.importorskip('optuna')
  rng, attempts = random.Random(0), list(view().attempts)
  for number in range(1, 40):
    changes = {'sampling.temperature': round(rng.uniform(0, 1.5), 3)}
    values = START.changed(changes).values
    score = 1 - changes['sampling.temperature'] / 1.5
    attempts.append(Attempt(number, 0, values, changes, score, 0.0, 'revert', ''))
  tpe = proposers.make(proposers.ProposerConfig.of_kind('tpe')())
  drawn = [tpe.propose(view(n, attempts=attempts)).changes for n in range(60, 70)]
  cool = [d.get('sampling.temperature', 1.0) < 0.5 for d in drawn]
  assert sum(cool) >= 6  # 3.3 at random


def test_a_missing_extra_is_one_line(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'optuna', None)
  with pytest.raises(InvalidSetting, match=r'pip install .m2jax\[evolve\]'):
    proposers.make(proposers.ProposerConfig.of_kind('tpe')())


ANSWER = {
  'changes': {'sampling.temperature': 0.3},
  'note': 'cooler',
  'memory': '- the start repeats itself',
  'criticism': 'none yet',
}


def test_a_model_by_url():
  """It sees bounds, attempts, failures and its memory; its answer is the proposal."""
  asked = []

  def answer(body):
    asked.append(body)
    return json.dumps(ANSWER)

  with model_server.Server(answer) as server:
    proposer = model.make(model.Config(url=server.url, model='m'))
    proposal = proposer.propose(view())
  assert (proposal.changes, proposal.note) == (ANSWER['changes'], 'cooler')
  assert proposal.source == f'm at {server.url}'
  system, user = (message['content'] for message in asked[0]['messages'])
  assert 'sampling.temperature' in system and 'high=192' in system
  assert all(text in user for text in ('assistant: no', 'none yet', 'Run.', '"start"'))


NO_ANSWERS = {
  'I would lower the temperature.': 'no JSON object',
  '[]': 'no JSON object with',
  '{"changes": 3}': 'no JSON object with',
  '{"changes": {}, "files": {"evaluator.py": "x"}}': 'other keys: files',
  '{"changes": {}, "note": 3}': 'must be texts',
  '[' * 100_000: 'no JSON object',
}


@pytest.mark.parametrize('text', NO_ANSWERS, ids=lambda text: text[:20])
def test_answers_that_are_no_proposal(text):
  with pytest.raises(ProposerFailed, match=NO_ANSWERS[text]):
    model.read(text)


def test_an_answer_in_a_block_after_thinking():
  text = f'<think>\n{{}}\n</think>\nHere:\n```json\n{json.dumps(ANSWER)}\n```\n'
  assert model.read(text).changes == ANSWER['changes']


def test_a_server_that_is_down_is_a_failed_proposal(monkeypatch):
  monkeypatch.setattr(chat_model, '_RETRY_S', 0.0)
  proposer = model.make(model.Config(url='http://127.0.0.1:9/v1', model='m'))
  with pytest.raises(ProposerFailed, match='127.0.0.1:9.*Connect'):
    proposer.propose(view())


@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'url': 'file:///etc/passwd'},
    {'url': 'http://me:secret@x/v1'},
    {'url': 'http://x', 'recorded': 'y'},
  ],
)
def test_where_a_model_is(settings):
  with pytest.raises(InvalidSetting, match='url'):
    model.Config(**settings)


def test_a_lineage_of_recorded_answers(tmp_path):
  """Labelled as that in the record; what is no answer is a rejected round."""
  answers = [json.dumps(ANSWER), 'none', json.dumps({'changes': {'seed': 1}})]
  path = tmp_path / 'answers.jsonl'
  path.write_text(''.join(json.dumps(answer) + '\n' for answer in answers))
  made = simulated.make(
    tmp_path / 'run', model.make(model.Config(recorded=str(path))), 3
  )
  state = made.run()
  made.close()
  assert [a.decision for a in state.attempts[1:]] == ['keep', 'reject', 'reject']
  lines = record.read(tmp_path / 'run' / record.FILE_NAME)
  first = next(line for line in lines if line['kind'] == 'proposal')
  assert first['source'] == 'recorded answers'
  assert first['memory'] == ANSWER['memory'] == state.memory
  assert list(lineage.replay(lines)) == []


def test_gepa_rewrites_a_text_from_failures():
  pytest.importorskip('gepa')
  from m2jax.evolve.proposers import gepa

  asked = []

  def answer(body):
    asked.append(body['messages'][0]['content'])
    return 'Better:\n```\nRead the error first.\n```'

  with model_server.Server(answer) as server:
    proposer = gepa.make(gepa.Config(url=server.url, model='m'))
    found = [proposer.propose(view(number)).changes for number in (1, 2, 3)]
  assert found == [
    {'instruction': 'Read the error first.\n\n{instruction}'},
    {'loops.message': 'Read the error first.'},
    {'system': 'Read the error first.'},
  ]
  assert 'assistant: no' in asked[0] and 'ended with: length' in asked[0]
  with pytest.raises(ProposerFailed, match='no failing'):
    proposer.propose(view(failures=()))
