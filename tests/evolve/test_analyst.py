"""The proposer of rules: what it reads, what it proposes, how far it comes."""

import dataclasses
import random
import statistics
import zlib

import pytest

from m2jax.evolve import evaluator, loop, operators, record, scaffold, weaknesses
from m2jax.evolve.evaluator import Result
from m2jax.evolve.gate import GateConfig
from m2jax.evolve.proposers import Attempt, View, analyst, random_search
from m2jax.evolve.weaknesses import WEAKNESSES
from tests.evolve import simulated
from tests.evolve.simulated import START

ANALYST = analyst.make(analyst.Config())
BOUNDS = scaffold.narrowed([('max_tokens', 16, 192)])


def said(content='', *calls, thought=''):
  functions = [{'function': {'name': n, 'arguments': a}} for n, a in calls]
  message = {'role': 'assistant', 'content': content, 'tool_calls': functions}
  return message | {'reasoning_content': thought}


def result(content, role='tool'):
  return {'role': role, 'content': content}


def call(number=0):
  return said('', ('look', f'{{"n": {number}}}'))


def failure(*messages, end='answer', score=0.0):
  """A failing trajectory, in the evaluator's own text."""
  text = evaluator.transcript([result('Do it.', 'user'), *messages])
  return {'score': score, 'end_reason': end, 'text': text}


FAILURES = {
  'the context is exceeded': failure(call(), result('a'), end='context'),
  'a response reaches max_tokens': failure(said('and'), end='length'),
  'a loop ends the episode': failure(call(), result('a'), end='loop'),
  'the time is over': failure(call(), result('a'), end='timeout'),
  'a call is malformed': failure(
    said('<tool'), result('error: malformed tool call', 'user'), end='max_turns'
  ),
  'the same call repeats': failure(
    call(), result('a'), call(), result('a'), end='max_turns'
  ),
  'two calls alternate': failure(
    *[m for i in range(4) for m in (call(i % 2), result('a'))], end='max_turns'
  ),
  'errors in a row': failure(
    call(1), result('error: x'), call(2), result('error: y'), end='max_turns'
  ),
  'the turns run out': failure(call(), result('a'), end='max_turns'),
  'an answer without a call': failure(said('It is done.')),
  'an observation is cut': failure(call(), result('a\n[17 bytes cut]\nb'), said('x')),
  'results were removed from the context': failure(
    call(1), result('[dropped]'), call(2), result('a'), said('x')
  ),
  'a very long observation': failure(call(), result('line\n' * 200), said('x')),
  'a call is made again later': failure(
    call(1), result('a'), call(2), result('b'), call(1), result('a'), said('x')
  ),
  'a call fails': failure(call(), result('error: x'), said('x')),
  'several calls in one turn': failure(
    said('', ('look', '{}'), ('go', '{}')), result('a'), result('b'), said('x')
  ),
  'mostly thinking': failure(call(), result('a'), said('x', thought='hm ' * 99)),
  'the answer is wrong': failure(call(), result('a'), said('x')),
  'it fails': {'score': 0.0, 'end_reason': 'answer', 'text': ''},
}
NONE_OF_THEM = failure(said('', ('look', '{}')), result('a'), end='other')


def start(values=START.values):
  return Attempt(0, None, values, {}, 0.4, 0.0, 'start', '')


def attempt(number, changes, effect, decision='revert', pairs=64, parent=0):
  values = START.changed(changes).values
  return Attempt(
    number, parent, values, changes, 0.4, effect, decision, 'hopeless', '', pairs
  )


def view(*failures, attempts=(), parent=START, node=0, bounds=BOUNDS, number=1):
  return View(
    number, 7, parent, node, bounds, (), (start(), *attempts), failures, ''
  )  # fmt: skip


def changes(*args, **options):
  return dict(ANALYST.propose(view(*args, **options)).changes)


@pytest.mark.parametrize('name', [weakness.name for weakness in WEAKNESSES])
def test_each_weakness_is_seen(name):
  assert name in weaknesses.weighed([FAILURES[name]])
  others = set(weaknesses.weighed([NONE_OF_THEM])) - {'it fails'}
  assert not others


ANSWERS = {
  'the context is exceeded': {'context.policy': 'drop_results'},
  'a response reaches max_tokens': {'retry.length': 1},
  'a call is malformed': {'retry.malformed': 1},
  'the same call repeats': {'loops.identical': 2},
  'two calls alternate': {'loops.alternating': 4},
  'errors in a row': {'loops.errors': 2},
  'the turns run out': {'rules': operators.LAST_TURN},
  'an answer without a call': {'system': 'Use the tools.'},
  'an observation is cut': {'observation_bytes': 4096},
  'a very long observation': {'observation_bytes': 1024},
  'the time is over': {'instruction': '{instruction}\nThink briefly.'},
  'results were removed from the context': {'context.keep_turns': 2},
  'a call is made again later': {'rules': operators.REPEATED_CALL},
  'a call fails': {'system': weaknesses._READ_ERROR},
  'several calls in one turn': {'descriptions': weaknesses._ONE_CALL},
  'mostly thinking': {'instruction': '{instruction}\nThink briefly.'},
  'the answer is wrong': {'system': weaknesses._VERIFY},
  'it fails': {'sampling.temperature': 0.75},
}
# It matters if there is a policy only, and this if there is a rule.
POLICY = START.changed({'context.policy': 'window'})
ENDS = START.changed({'loops.reaction': 'end', 'loops.errors': 2})


@pytest.mark.parametrize('name', ANSWERS)
def test_each_weakness_leads_to_its_change(name):
  parent = POLICY if name == 'results were removed from the context' else START
  assert changes(FAILURES[name], parent=parent) == ANSWERS[name]


def test_a_change_that_needs_another_waits_for_it():
  removed = FAILURES['results were removed from the context']
  assert 'context.keep_turns' not in changes(removed)
  ended = FAILURES['a loop ends the episode']
  assert changes(ended, parent=ENDS) == {'loops.reaction': 'message'}
  assert 'loops.reaction' not in changes(ended)


def test_every_remedy_can_be_proposed():
  """Each is a field with operators, and a value that is within the bounds."""
  for weakness in WEAKNESSES:
    for field, value in weakness.remedies:
      if isinstance(value, weaknesses.Step):
        assert analyst.rungs(field, scaffold.FIELDS), field
      else:
        assert not scaffold.FIELDS[field].problem(value), (field, value)
        assert value in operators.allowed(analyst._OPERATORS[field], scaffold.FIELDS)


def test_the_most_frequent_weakness_is_answered_first():
  context, length = FAILURES['the context is exceeded'], FAILURES[
    'a response reaches max_tokens'
  ]  # fmt: skip
  assert changes(context, length, length) == {'retry.length': 1}
  assert changes(context, context, length) == {'context.policy': 'drop_results'}
  partly = length | {'score': 0.8}  # little is lost
  assert changes(context, partly, partly) == {'context.policy': 'drop_results'}


def test_numbers_step_on_while_they_help_and_else_back():
  one = FAILURES['it fails']
  field = 'sampling.temperature'
  helped, hurt = attempt(1, {field: 0.75}, 0.04), attempt(1, {field: 0.75}, -0.04)
  assert changes(one, attempts=[helped]) == {field: 0.5}
  assert changes(one, attempts=[hurt]) == {field: 1.25}
  both = hurt, attempt(2, {field: 1.25}, -0.04)
  assert field not in changes(one, attempts=both)


def test_a_falsified_remedy_gives_way_to_the_next():
  one = FAILURES['the same call repeats'] | {'end_reason': 'other'}
  tried = attempt(1, {'loops.identical': 2}, -0.1)
  assert changes(one, attempts=[tried]) == {'system': weaknesses._NEVER_TWICE}


def test_a_weakness_whose_remedies_fail_gives_way_to_others():
  one = FAILURES['the same call repeats'] | {'end_reason': 'other'}
  tried = (
    attempt(1, {'loops.identical': 2}, -0.1),
    attempt(2, {'system': weaknesses._NEVER_TWICE}, -0.1),
  )
  assert changes(one, attempts=tried) == {'sampling.temperature': 0.75}


def test_what_is_better_by_effort_is_no_base():
  tried = attempt(1, {'max_tokens': 190}, 0.1)
  assert analyst.Known.of(view(attempts=[tried])).best
  reason = 'effort: 2.50 times the tokens of the incumbent'
  dear = dataclasses.replace(tried, reason=reason)
  assert not analyst.Known.of(view(attempts=[dear])).best


def test_a_rejected_change_is_not_repeated():
  one = FAILURES['the same call repeats'] | {'end_reason': 'other'}
  rejected = Attempt(1, 0, None, {'loops.identical': 2}, None, None, 'reject', 'smoke')
  assert changes(one, attempts=[rejected]) == {'system': weaknesses._NEVER_TWICE}


def test_two_that_looked_better_are_combined():
  tried = (
    attempt(1, {'loops.identical': 2}, 0.03),
    attempt(2, {'system': 'Use the tools.'}, 0.05),
    attempt(3, {'max_tokens': 64}, -0.05),
  )
  found = changes(FAILURES['it fails'], attempts=tried, number=4)
  assert found == {'loops.identical': 2, 'system': 'Use the tools.'}


def test_a_sentence_is_added_to_a_prompt():
  parent = START.changed({'system': 'You are careful.'})
  kept = attempt(1, {'system': 'You are careful.'}, 0.2, decision='keep')
  one = FAILURES['an answer without a call']
  found = changes(one, attempts=[kept], parent=parent, node=1)
  assert found == {'system': 'You are careful.\nUse the tools.'}


def test_an_effect_is_credited_to_what_is_new():
  a, b = {'loops.identical': 2}, {'max_tokens': 64}
  many = 10**6
  tried = attempt(1, a, 0.1, pairs=many), attempt(2, a | b, 0.1, pairs=many)
  found = analyst.Known.of(view(attempts=tried)).worth
  assert found['loops.identical', '2'] == pytest.approx(0.1, abs=1e-3)
  assert found['max_tokens', '64'] == pytest.approx(0, abs=1e-3)
  few = analyst.Known.of(view(attempts=[attempt(1, a, 0.1, pairs=16)])).worth
  assert 0 < few['loops.identical', '2'] < 0.03


def test_memory_says_what_is_known_in_a_page():
  fields = [o.field for o in operators.OPERATORS if analyst.rungs(o.field, BOUNDS)]
  values = [(f, v) for f in fields for v in analyst.rungs(f, BOUNDS)]
  tried = [attempt(i + 1, {f: v}, (-1) ** i / 50) for i, (f, v) in enumerate(values)]
  assert len(tried) > 60
  found = ANALYST.propose(view(*FAILURES.values(), attempts=tried))
  assert len(found.memory) < 4000 and len(found.criticism) < 1000
  first = ANALYST.propose(view(FAILURES['it fails'], attempts=tried[:2]))
  assert 'it fails' in first.memory and 'temperature = 0.25' in first.memory
  assert 'round 2' in first.criticism and '-0.020' in first.criticism


def test_hostile_texts_are_data():
  """What a task or a model wrote changes counts; it cannot end the lineage."""
  rng = random.Random(0)
  pieces = ['assistant: ', 'tool: ', '\n', '  call ', 'error: ', '[…]', '\ufffd', '{}']
  for _ in range(200):
    text = ''.join(rng.choices(pieces, k=rng.randrange(40)))
    hostile = {'score': 0.5, 'end_reason': text[:9], 'text': text}
    assert changes(hostile)


# --- A lineage: some fields matter, and half of the draws are a candidate's own.

CAUSES = {
  'a call is malformed': (0.15, lambda v: v['retry.malformed'] > 0),
  'the same call repeats': (0.12, lambda v: v['loops.identical'] > 0),
  'the answer is wrong': (0.12, lambda v: 'verify' in (v['system'] or '')),
  'a call fails': (0.1, lambda v: v['rules'] == operators.AFTER_ERROR),
}


def success(values) -> float:
  """0.25 of the start, 0.84 of the best."""
  p = 0.35 + sum(share for share, fixed in CAUSES.values() if fixed(values))
  return max(p - 0.2 * abs(values['sampling.temperature'] - 0.5), 0)


class Evaluator:
  def run(self, one, specs, seeds):
    p, found, digest = success(one.values), [], one.digest
    left = [name for name, (_, fixed) in CAUSES.items() if not fixed(one.values)]
    for spec, seed in zip(specs, seeds, strict=True):
      own = digest if seed % 2 else ''
      u = zlib.crc32(f'{spec} {seed} {own}'.encode()) / 2**32
      name = left[seed % len(left)] if left else 'it fails'
      shown = FAILURES[name]
      end, text = shown['end_reason'], '' if u < p else shown['text']
      found.append(Result(float(u < p), end, tokens=1, text=text))
    return found


class Trees:
  """The repository, without one."""

  def __init__(self, workdir):
    self._workdir = workdir

  def open(self, number, parent):
    return self._workdir / 'tree'

  def __getattr__(self, name):
    return lambda *args: ''


@pytest.fixture
def evolved(tmp_path, monkeypatch):
  monkeypatch.setattr(loop.trees, 'Trees', Trees)
  monkeypatch.setattr(record.os, 'fsync', lambda file: None)

  def run(proposer, seed):
    settings = dict(
      gate=GateConfig(looks=(16, 64, 128), alpha=0.2),
      bounds=(('max_tokens', 16, 192), ('observation_bytes', 64, 4096)),
    )
    workdir = tmp_path / f'{type(proposer).__name__}{seed}'
    made = simulated.make(workdir, proposer, 100, Evaluator(), seed=seed, **settings)
    state = made.run()
    made.close()
    return state

  return run


def reached(state) -> float:
  return success(state.nodes[state.incumbent].scaffold.values)


def test_a_hundred_rounds_are_new_and_within_the_bounds(evolved):
  state = evolved(ANALYST, 1)
  assert state.rounds == 100 and reached(state) > 0.7
  assert not [a.reason for a in state.attempts if a.decision == 'reject']
  assert not [a for a in state.attempts if 'None' in (a.values['system'] or '')]
  last = state.view(101, state.incumbent)
  assert ANALYST.propose(last) == ANALYST.propose(last)


@pytest.mark.long
def test_it_beats_random_search(evolved):
  drawn = random_search.make(random_search.Config())
  mine, random = (
    statistics.median(reached(evolved(proposer, seed)) for seed in range(3))
    for proposer in (ANALYST, drawn)
  )
  assert mine > random + 0.05
