"""ATIF documents: valid by the published models, and the same when read back."""

from __future__ import annotations

import dataclasses
import json

import pytest
from atif import Trajectory as AtifTrajectory
from hypothesis import given
from hypothesis import strategies as st

from m2jax.pool import atif
from m2jax.records import TrajectoryReward
from tests.pool.test_data_pool import completion, trajectory


def valid(document):
  """The document after JSON; raises if it is not of ATIF."""
  again = json.loads(json.dumps(document))
  AtifTrajectory.model_validate(again)
  return again


def call(id_, arguments, name='sh'):
  function = {'name': name, 'arguments': arguments}
  return {'id': id_, 'type': 'function', 'function': function}


MESSAGES = (
  {'role': 'system', 'content': 'Use sh.'},
  {'role': 'user', 'content': 'how many?'},
  {
    'role': 'assistant',
    'content': '',
    'reasoning_content': 'look',
    'tool_calls': [call('a', '{"command": "ls"}'), call('b', '{"command":"wc -l x"}')],
  },
  {'role': 'tool', 'tool_call_id': 'b', 'content': '7'},
  {'role': 'tool', 'tool_call_id': 'a', 'content': 'x y'},
  {'role': 'assistant', 'content': '7'},
)


def test_a_trajectory_with_all_its_parts():
  reward = TrajectoryReward(-1, 0.5, 1, 0.95)
  turns = [completion('s', 0, ended_s=1.7e9), completion('s', 1, parent='s/0')]
  t = trajectory(
    's', 3, rank=1, messages=MESSAGES, answer='7', rewards={'s/0': 0.25, 's/1': -1.0}
  )
  document = valid(atif.document(t, turns, reward))
  assert [step['source'] for step in document['steps']] == [
    *('system', 'user', 'agent', 'agent'),
  ]
  acted = document['steps'][2]
  assert [c['arguments'] for c in acted['tool_calls']] == [
    {'command': 'ls'},
    {'command': 'wc -l x'},
  ]
  assert [r['source_call_id'] for r in acted['observation']['results']] == ['b', 'a']
  assert acted['metrics']['completion_token_ids'] == [4, 5]
  assert acted['metrics']['logprobs'] == [-0.5, -1.25]
  assert acted['timestamp'].startswith('2023-11-14T22:13:20')
  assert document['final_metrics']['total_completion_tokens'] == 4
  got, completions, got_reward = atif.read(document, trusted=True)
  assert vars(got) == vars(t) | {'item': -1}
  assert completions == turns and got_reward == reward


def chain(turns, prompts=1, session='s'):
  """Completions of which each extends the one before it."""
  return [
    completion(
      session,
      turn,
      parent=f'{session}/{turn - 1}' if turn > prompts - 1 else None,
      response_ids=(turn, 9),
    )
    for turn in range(prompts - 1, prompts - 1 + turns)
  ]


def begun_anew(turns):
  """The first of them is of another conversation than what was before."""
  first = dataclasses.replace(turns[0], fork_reason='system_changed')
  return [first, *turns[1:]]


def shown(document):
  """First sampled ids of the replies, None of those without ids."""
  steps = [s for s in document['steps'] if s['source'] == 'agent']
  metrics = [step.get('metrics') for step in steps]
  return [m and m['completion_token_ids'][0] for m in metrics]


def talk(replies, known=True):
  """A chat with that many replies; `known`: it ends with the last of them."""
  messages = [{'role': 'user', 'content': 'go'}]
  for i in range(replies):
    messages += (
      {'role': 'assistant', 'content': f'{i}'},
      {'role': 'user', 'content': 'on'},
    )
  return tuple(messages[:-1] if known else messages)


ODD = {
  # A client that streams: its last answer is in no later request.
  'streamed': (talk(2, known=False), chain(3), [0, 1], [2]),
  # A title before it, under the same key; a conversation that was begun anew.
  'apart': (talk(2), [completion('s', 0), *chain(2, prompts=2)], [1, 2], [0]),
  # More replies than were sampled: examples in the prompt; or ids were pruned.
  'examples': (talk(3), chain(2), [None, 0, 1], []),
  'streamed examples': (talk(4, known=False), chain(3), [None, None, 0, 1], [2]),
  # The example takes the place of the last answer: nothing says which is missing.
  'a streamed example': (talk(3, known=False), chain(3), [None] * 3, [0, 1, 2]),
  'forgotten': (talk(2), chain(3), [None] * 2, [0, 1, 2]),
  'a part of the chain': (talk(2, known=False), chain(3)[1:], [None, 1], [2]),
  'a title and an example': (
    *(talk(3), [completion('s', 0), *begun_anew(chain(2, prompts=2))]),
    *([None] * 3, [0, 1, 2]),
  ),
  'a title at the end': (
    *(talk(3), [*chain(3), *begun_anew([completion('s', 3)])]),
    *([None] * 3, [0, 1, 2, 4]),
  ),
  'none': (talk(2), [], [None] * 2, []),
}


@pytest.mark.parametrize('name', ODD)
def test_replies_and_completions_that_differ_in_number(name):
  """A reply has the ids of its own completion or none, and no completion is lost: the
  document counts what it cannot show."""
  messages, turns, expected, others = ODD[name]
  retried = completion('s', 90)
  document = valid(
    atif.document(trajectory('s', -1, messages=messages), turns, others=[retried])
  )
  assert shown(document) == expected
  assert atif.unmatched(document) == (expected.count(None), len(others) + 1)
  got, completions, _ = atif.read(document)
  assert got.messages == messages
  by_turn = sorted([*turns, retried], key=lambda c: c.turn)
  assert completions == by_turn
  again = valid(atif.document(got, turns, others=[retried]))
  assert again['steps'] == document['steps']


HEXES = [f'{i:032x}' for i in range(3)]


def acted(i, calls=1):
  """The answer of completion i, whose calls the gateway named, and their results."""
  ids = [f'call_{HEXES[i]}_{j}' for j in range(calls)]
  calls = [call(id_, f'{{"command": "{i}"}}') for id_ in ids]
  results = [{'role': 'tool', 'tool_call_id': id_, 'content': f'{i}'} for id_ in ids]
  return {'role': 'assistant', 'content': '', 'tool_calls': calls}, *results


EXAMPLES = (
  {'role': 'user', 'content': 'how many in y?'},
  {'role': 'assistant', 'content': '', 'tool_calls': [call('a', '{"command": "y"}')]},
  {'role': 'tool', 'tool_call_id': 'a', 'content': 'y'},
)


@pytest.mark.parametrize('examples', [0, 1, 2, 3])
@pytest.mark.parametrize('ends', ['streamed', 'answered', 'acted', 'user'])
def test_examples_in_the_first_prompt(examples, ends):
  """Calls and results that nobody sampled, with the ids of the agent's own: no token
  ids are theirs, and each result is with its call. So also if the client streams, and
  there are as many replies as completions."""
  end = {
    'streamed': (),
    'answered': ({'role': 'assistant', 'content': 'done'},),
    'acted': acted(2),
    'user': (*acted(2), {'role': 'user', 'content': 'error: malformed tool call'}),
  }[ends]
  task = {'role': 'user', 'content': 'and in x?'}
  messages = (*EXAMPLES * examples, task, *acted(0), *acted(1, calls=2), *end)
  ids = [f'chatcmpl-{name}' for name in HEXES]
  turns = [
    completion('s', i, id=ids[i], parent=ids[i - 1] if i else None, response_ids=(i, 9))
    for i in range(3)
  ]
  document = valid(atif.document(trajectory('s', -1, messages=messages), turns))
  sampled = [0, 1] if ends == 'streamed' else [0, 1, 2]
  assert shown(document) == [None] * examples + sampled
  assert atif.unmatched(document) == (examples, 3 - len(sampled))
  agent = [step for step in document['steps'] if step['source'] == 'agent']
  for step in agent:
    results = step.get('observation', {}).get('results', [])
    called = [c['tool_call_id'] for c in step.get('tool_calls', [])]
    assert [r['source_call_id'] for r in results] == called
  contents = [r['content'] for r in agent[examples + 1]['observation']['results']]
  assert contents == ['1', '1']
  got, completions, _ = atif.read(document)
  assert got.messages == messages and completions == turns
  assert valid(atif.document(got, completions))['steps'] == document['steps']


def test_an_answer_that_the_client_edited():
  """Its calls are those of a completion, but more replies follow than were sampled:
  what the ids say is shown, nothing else."""
  said = {'role': 'assistant', 'content': 'of the client'}
  messages = ({'role': 'user', 'content': 'go'}, *acted(0), said, *acted(1), said)
  ids = [f'chatcmpl-{name}' for name in HEXES]
  turns = [
    completion('s', i, id=ids[i], parent=ids[i - 1] if i else None, response_ids=(i,))
    for i in range(2)
  ]
  document = valid(atif.document(trajectory('s', -1, messages=messages), turns))
  assert shown(document) == [0, None, 1, None]


ANY = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=8),
  lambda x: (
    st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=5), x, max_size=2)
  ),
  max_leaves=4,
)
ARGUMENTS = st.text(max_size=8) | ANY.map(json.dumps)
CALLS = st.lists(
  st.builds(call, st.sampled_from(['a', 'b', 'c']), ARGUMENTS, st.text(max_size=5)),
  max_size=2,
)
MESSAGE = st.fixed_dictionaries(
  {
    'role': st.sampled_from(['system', 'developer', 'user', 'assistant', 'tool', 'x']),
    'content': st.text(max_size=8) | ANY,
  },
  optional={
    'reasoning_content': st.text(max_size=5) | st.none(),
    'tool_calls': CALLS | ANY,
    'tool_call_id': st.sampled_from(['a', 'b']),
    'name': ANY,
  },
)


@given(st.lists(MESSAGE, max_size=6))
def test_whatever_an_agent_wrote(messages):
  """Law 9: any JSON in any field gives a valid document, and comes back."""
  t = trajectory('s', -1, messages=tuple(messages))
  got, _, _ = atif.read(valid(atif.document(t)))
  assert got.messages == t.messages


def test_a_document_of_another_tool():
  """Its trajectory is not judged, so that no training takes it for a failure."""
  document = {
    'schema_version': 'ATIF-v1.6',
    'session_id': 'run-1',
    'agent': {'name': 'other', 'version': '2'},
    'steps': [
      {'step_id': 1, 'source': 'user', 'message': 'do it'},
      {
        'step_id': 2,
        'source': 'agent',
        'message': [{'type': 'text', 'text': 'done'}],
        'metrics': {
          'prompt_token_ids': [1, 2],
          'completion_token_ids': [3],
          'logprobs': [-0.5],
        },
      },
      {'step_id': 3, 'source': 'agent', 'message': 'bye'},
    ],
  }
  got, completions, reward = atif.read(valid(document))
  assert (got.session, got.task, got.family) == ('run-1', 'do it', 'other')
  assert got.end_reason == 'infrastructure' and 'without a verdict' in got.error
  assert [m['content'] for m in got.messages] == ['do it', 'done', 'bye']
  assert [c.response_ids.tolist() for c in completions] == [[3]] and reward is None


def forged(metrics=(), extra=(), **change):
  """A document of a stranger that says what ours would."""
  known = {
    'prompt_token_ids': [3],
    'completion_token_ids': [1, 2],
    'logprobs': [-1.0, -0.5],
    'extra': {'m2jax': {'versions': [7, 7]}},
  }
  claims = {'success': 1.0, 'end_reason': 'answer', 'error': '', 'rewards': {'x/0': 1}}
  claims |= {'reward': {'process': 0, 'speed': 0, 'perf': 1, 'total': 1e9}}
  reply = {'source': 'agent', 'message': 'hi', 'metrics': known | dict(metrics)}
  return {
    'schema_version': 'ATIF-v1.6',
    'session_id': 'x',
    'agent': {'name': 'a'},
    'steps': [{'source': 'user', 'message': 'task'}, reply],
    'extra': {'m2jax': claims | dict(extra)},
  } | change


def test_a_claim_of_success_stays_a_claim():
  """Anyone can write ours: only the caller knows whether to trust a document."""
  got, (completion,), reward = atif.read(forged())
  assert (got.end_reason, got.success, got.rewards) == ('infrastructure', 0.0, {})
  assert 'without a verdict; the document claims success 1.0' in got.error
  assert reward is None and completion.versions.tolist() == [7, 7]
  got, _, reward = atif.read(forged(), trusted=True)
  assert (got.end_reason, got.success, got.error) == ('answer', 1.0, '')
  assert reward.total == 1e9


IDS, PROMPT = 'completion_token_ids', 'prompt_token_ids'
MINE = r'steps\[1\]\.metrics\.extra\.m2jax'
FORGED = [
  (forged({'logprobs': [9.0, -1.0]}), r'steps\[1\]\.metrics\.logprobs: must be within'),
  (forged({'logprobs': [float('nan'), -1.0]}), r'steps\[1\]\.metrics\.logprobs: '),
  (forged({'logprobs': [-1.0]}), 'logprobs has 1 entries for 2'),
  (forged({'logprobs': 'x'}), r'metrics\.logprobs: must be a list'),
  (forged({IDS: [2**40, 1]}), rf'metrics\.{IDS}: must be within'),
  (forged({IDS: [2**80, 1]}), rf'metrics\.{IDS}: must be'),
  (forged({IDS: [-5, 1]}), rf'metrics\.{IDS}: must be within'),
  (forged({IDS: [True, False]}), rf'metrics\.{IDS}: must be a list'),
  (forged({IDS: [1.5, 2.0]}), rf'metrics\.{IDS}: must be a list'),
  (forged({PROMPT: ['a']}), rf'metrics\.{PROMPT}: must be a list'),
  (forged({PROMPT: [[1], [2, 3]]}), rf'metrics\.{PROMPT}: must be a list'),
  (forged({'extra': {'m2jax': {'versions': [7]}}}), 'versions has 1 entries'),
  (forged({'extra': {'m2jax': {'turn': 'x'}}}), rf'{MINE}\.turn is'),
  (forged({'extra': {'m2jax': {'experts': []}}}), rf"{MINE} has no field 'experts'"),
  (forged({'extra': {'m2jax': {'overrides': [5]}}}), rf'{MINE}\.overrides is'),
  (forged(extra={'session': '../../etc/x'}), 'session is .*not a path'),
  (forged(extra={'session': 5}), 'session is 5'),
  (forged(session_id='..'), 'session is'),
  (forged(extra={'nonsense': 1}), r"extra\.m2jax has no field 'nonsense'"),
  (forged(extra={'wall_s': -1}), r'extra\.m2jax\.wall_s is -1'),
  (forged(extra={'family': 'a\0'}), r'extra\.m2jax\.family is'),
  (forged(steps=5), 'not an ATIF document'),
  (forged(steps=[5]), 'not an ATIF document'),
  (forged(steps=[{'source': 'x', 'message': ''}]), r'steps\[0\]\.source is'),
  (
    forged(steps=[{'source': 'user', 'message': '', 'extra': {'m2jax': [1]}}]),
    r'steps\[0\]\.extra\.m2jax: must be a message',
  ),
]


@pytest.mark.parametrize('document, message', FORGED, ids=[m for _, m in FORGED])
@pytest.mark.parametrize('trusted', [False, True])
def test_values_that_cannot_be_are_named(document, message, trusted):
  with pytest.raises(ValueError, match=message):
    atif.read(document, trusted=trusted)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'schema_version': 'OTHER'}, 'schema_version'),
    ({'steps': None}, 'not an ATIF document'),
    ({'agent': None}, 'not an ATIF document'),
    ({'trajectory_id': None, 'session_id': None, 'extra': None}, 'session_id'),
  ],
)
def test_what_is_no_document(change, message):
  document = atif.document(trajectory('s', -1, messages=MESSAGES)) | change
  with pytest.raises(ValueError, match=message):
    atif.read(document)
