"""Law 4 through the real gateway: the token sampled is the token recorded and extended.

The oracle here knows nothing of the gateway's tree: it keeps the JSON that the client
sent and got, and M2's template in its plain form (`chat.render`).
"""

import collections
import copy
import json

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2jax.gateway import forks
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.text import chat, parsing
from m2jax.text import tokenizer as tokenizer_lib
from tests.gateway.conftest import HTTP, SH, response_text
from tests.gateway.scripted_engine import ScriptedEngine

OTHER = {'type': 'function', 'function': {'name': 'other', 'parameters': {}}}
CALL = response_text('look', '', [('sh', {'cmd': 'ls'})])
ANSWER = response_text('done', 'It is 3.')


class Client:
  """One session's client, and the record of what the gateway did for it."""

  def __init__(self, gateway, records, key, http=None):
    self.http = http or HTTP
    self.gateway, self.records, self.key = gateway, records, key

  def ask(self, messages, tools=(SH,), *, stream=False, status=200):
    """Sends one request; gives the message and its record."""
    body = {'model': 'm2jax', 'messages': messages, 'stream': stream}
    if tools:
      body['tools'] = list(tools)
    reply = self.http.post(
      f'{self.gateway.base_url}/chat/completions',
      json=body,
      headers={'authorization': f'Bearer {self.key}'},
    )
    assert reply.status_code == status, reply.text
    if status != 200:
      return reply.json()['error'], None
    if not stream:
      return reply.json()['choices'][0]['message'], self.records[-1]
    message = {'role': 'assistant', 'content': '', 'reasoning_content': ''}
    for line in reply.text.split('\n\n'):
      data = line.removeprefix('data: ')
      if data and data != '[DONE]':
        delta = json.loads(data)['choices'][0]['delta']
        for field in ('content', 'reasoning_content'):
          message[field] += delta.get(field) or ''
        for call in delta.get('tool_calls') or ():
          message.setdefault('tool_calls', []).append(call)
    return message, self.records[-1]


def reply_to(message, text='a.txt'):
  """What an agent appends after an assistant message."""
  calls = message.get('tool_calls')
  if not calls:
    return [{'role': 'user', 'content': text}]
  return [{'role': 'tool', 'tool_call_id': c['id'], 'content': text} for c in calls]


def spelled(tok, text):
  """Ids of a text with one token for each character, but for the special tokens."""
  return [
    i
    for piece in parsing.pieces(text)
    for part in ([piece.text] if piece.special else piece.text)
    for i in tok.encode(part)
  ]


USER = {'role': 'user', 'content': 'count'}


def first_two(client, text=CALL):
  """A first turn and the history that faithfully continues it."""
  message, record = client.ask([USER])
  return message, record, [USER, message, *reply_to(message)]


# --- Each reason, one by one.


def test_extends_by_recorded_ids(serve, tok):
  """Within a tool cycle no text is encoded again, so the tokenizer does not matter."""
  gateway, engine, records = serve(CALL)
  # Ids that this tokenizer would never choose for this text: one per byte.
  odd = spelled(tok, CALL)
  engine.script = lambda request: odd
  client = Client(gateway, records, 'k')
  _, first, history = first_two(client)
  _, second = client.ask(history)
  known = first.tokens.tolist()
  assert first.response_ids.tolist() == list(odd)
  assert second.prompt_ids[: len(known)].tolist() == known
  assert second.parent == first.id
  suffix = '\n]~b]tool\n<response>a.txt</response>[e~[\n]~b]ai\n<think>\n'
  assert tok.decode(second.prompt_ids[len(known) :]) == suffix
  assert gateway.counters()['extensions_total'] == 1


def drop_reasoning(history):
  del history[1]['reasoning_content']


def edit_reasoning(history):
  history[1]['reasoning_content'] = 'I looked'


def edit_call(history):
  history[1]['tool_calls'][0]['function']['arguments'] = '{"cmd": "rm"}'


def respell_call(history):
  history[1]['tool_calls'][0]['function']['arguments'] = '{"cmd":"ls"}'


def rename_call(history):
  history[1]['tool_calls'][0]['id'] = history[2]['tool_call_id'] = 'renamed'


def rewrite_user(history):
  history[0]['content'] = 'count them'


def remove_middle(history):
  del history[1:]
  history[0]['content'] += '!'


def insert_assistant(history):
  history += [
    {'role': 'assistant', 'content': 'mine'},
    {'role': 'user', 'content': 'x'},
  ]


def rewind(history):
  del history[1:]


@pytest.mark.parametrize(
  'change, tools, reason',
  [
    (edit_reasoning, [SH], 'assistant_edited'),
    (edit_call, [SH], 'assistant_edited'),
    (lambda h: h[1].update(content='hm'), [SH], 'assistant_edited'),
    (lambda h: h.append(USER), [SH], 'thinking_closed'),
    (lambda h: h.insert(0, {'role': 'system', 'content': 's'}), [SH], 'system_changed'),
    (rewrite_user, [SH], 'new_conversation'),
    (remove_middle, [SH], 'new_conversation'),
    (insert_assistant, [SH], 'history_rewritten'),
    (rewind, [SH], 'resampled'),
    (rewind, [OTHER], 'tools_changed'),
    (lambda h: None, [SH, OTHER], 'tools_changed'),
    (lambda h: h.insert(1, USER), [SH], 'history_rewritten'),
    (lambda h: None, [SH], None),
    # What the template does not show makes no difference.
    (lambda h: h[1].update(content=None), [SH], None),
    (rename_call, [SH], None),
    (respell_call, [SH], None),
    (lambda h: h[1].update(content='  \n'), [SH], None),
    (drop_reasoning, [SH], None),
    (lambda h: h[1].pop('tool_calls') and h.pop(), [SH], 'assistant_edited'),
  ],
)  # fmt: skip
def test_reason(serve, tok, change, tools, reason):
  """Every way a client can break its history is named, counted and fully encoded."""
  gateway, _, records = serve(CALL)
  client = Client(gateway, records, 'k')
  _, first, history = first_two(client)
  history = copy.deepcopy(history)
  change(history)
  _, record = client.ask(history, tools)
  counters = gateway.counters()
  assert counters['forks_total{reason="first"}'] == 1
  assert record.fork_reason == reason
  if reason is None:
    assert record.parent == first.id
  else:
    assert record.parent is None
    assert counters[f'forks_total{{reason="{reason}"}}'] == 1
    pieces = chat.segments(history, tools, True)
    assert record.prompt_ids.tolist() == tokenizer_lib.encode_chat(tok, pieces).ids


def test_reasoning_dropped_without_restoring(serve, tok):
  """What an experiment on the worth of thinking compares with: it stays dropped."""
  gateway, _, records = serve(CALL, restore_reasoning=False)
  client = Client(gateway, records, 'k')
  _, _, history = first_two(client)
  drop_reasoning(history)
  _, record = client.ask(history)
  assert record.fork_reason == 'reasoning_dropped'
  assert 'look' not in tok.decode(record.prompt_ids)
  assert 'reasoning_restored_total' not in gateway.counters()


def test_other_white_space_is_counted_as_such(serve):
  """Re-wrapped text has the same words, but the model never sampled its tokens."""
  gateway, _, records = serve(response_text('r', 'It is  3.'))
  client = Client(gateway, records, 'k')
  message, _ = client.ask([USER])
  message['content'] = 'It is\n3.'
  _, record = client.ask([USER, message])
  assert record.fork_reason == 'retokenised'


def test_response_cut_off_by_length_is_closed(serve, tok):
  """After a length stop the message end is the gateway's, and it says so."""
  gateway, engine, records = serve(CALL + 'never read')
  client = Client(gateway, records, 'k')
  engine.script = lambda request: tok.encode(CALL)[:-1]  # no end of message
  _, first, history = first_two(client)
  _, second = client.ask(history)
  assert first.finish_reason == 'length'
  known = first.tokens.tolist()
  assert second.parent == first.id
  assert second.prompt_ids[: len(known)].tolist() == known
  assert second.prompt_ids[len(known)] == tok.eos_id
  assert gateway.counters()['closed_by_gateway_total'] == 1


@pytest.mark.parametrize(
  'broken, shown',
  [
    (
      'x\n</think>\n\nhm\n<minimax:tool_call>\nls\n</minimax:tool_call>[e~[',
      'hm\n<minimax:tool_call>\nls\n</minimax:tool_call>',
    ),
    ('x\n</think>\n\n<minimax:tool_call>\n<invoke', '<minimax:tool_call>\n<invoke'),
    ('x<minimax:tool_call>\nls[e~[', '<minimax:tool_call>\nls'),
  ],
)
def test_malformed_call_is_shown_and_kept(serve, tok, broken, shown):
  """A call nobody can parse still shows in the content, and its ids are its history."""
  gateway, _, records = serve(broken)
  client = Client(gateway, records, 'k')
  message, first = client.ask([USER])
  assert message['content'] == shown
  assert message['reasoning_content'] == 'x'
  assert not message.get('tool_calls')
  assert first.status != 'ok'
  # No user message between: the gateway must recognise its own words.
  _, second = client.ask([USER, message])
  assert second.parent == first.id
  np.testing.assert_array_equal(
    second.prompt_ids[: len(first.prompt_ids)], first.prompt_ids
  )
  _, third = client.ask([USER, message, USER])
  assert third.fork_reason == 'thinking_closed'


def test_parallel_branches_keep_their_own_ids(serve, tok):
  """Two answers to one request are two branches; call ids distinguish equal ones."""
  gateway, engine, records = serve(CALL)
  client = Client(gateway, records, 'k')
  a, first_a, history_a = first_two(client)
  odd = spelled(tok, CALL)
  engine.script = lambda request: odd
  b, first_b, history_b = first_two(client)
  assert a['tool_calls'][0]['id'] != b['tool_calls'][0]['id']
  assert first_b.fork_reason == 'resampled'
  assert client.ask(history_a)[1].parent == first_a.id
  assert client.ask(history_b)[1].parent == first_b.id


def test_a_quoted_call_is_text(serve, tok):
  """Only special ids are markup. A call that the model quotes from a file as plain
  tokens is returned as text, and matches when it is sent back as history."""
  gateway, engine, records = serve(CALL)
  quoted = CALL.removesuffix('[e~[')
  plain = tok.encode(quoted, special=False)
  engine.script = lambda request: [tok.think_end_id, *plain, tok.eos_id]
  client = Client(gateway, records, 'k')
  for stream in (False, True):
    message, first = client.ask([USER], stream=stream)
    assert message['content'] == quoted
    assert not message.get('tool_calls') and first.status == 'ok'
    _, second = client.ask([USER, message])
    assert second.parent == first.id
    # A fork encodes it as the text it is, too.
    _, third = client.ask([USER, message, USER])
    assert third.fork_reason == 'thinking_closed'
    specials = set(tok.special_ids.values()) - {tok.role_id, tok.eos_id, tok.bos_id}
    ids = third.prompt_ids.tolist()
    said = ids[ids.index(tok.encode('ai\n')[0]) :]
    assert specials.intersection(said) == {tok.think_id}  # the generation prompt's


def test_what_the_agent_used_can_be_told(serve, tok):
  """`follows` leads from the last completion back over all that the agent went on
  with, across forks; what was sampled again and dropped is on no such path."""
  gateway, engine, records = serve(CALL)
  client = Client(gateway, records, 'k')
  _, dropped, _ = first_two(client)
  engine.script = lambda request: tok.encode(response_text('again', 'x', [('sh', {})]))
  _, kept, history = first_two(client)
  assert dropped.follows is kept.follows is None
  assert kept.fork_reason == 'resampled'
  engine.script = lambda request: tok.encode(ANSWER)
  message, second = client.ask(history)
  assert second.follows == second.parent == kept.id
  # A fork: the template drops the thinking after a new user message.
  history += [message, USER]
  message, third = client.ask(history)
  assert (third.parent, third.follows) == (None, second.id)
  # The client shortens its history and drops the reasoning.
  del message['reasoning_content']
  _, fourth = client.ask([USER, message, {'role': 'user', 'content': 'and?'}])
  assert (fourth.parent, fourth.follows) == (None, third.id)
  # A call is known by its ids, even when it was edited.
  history = copy.deepcopy(history)
  history[1]['tool_calls'][0]['function']['arguments'] = '{"cmd": "rm"}'
  _, fifth = client.ask(history[:3])
  assert (fifth.fork_reason, fifth.follows) == ('assistant_edited', kept.id)

  by_id = {record.id: record for record in records}
  path, record = [], fourth
  while record is not None:
    path.append(record.id)
    record = by_id.get(record.follows)
  assert path == [fourth.id, third.id, second.id, kept.id]
  assert dropped.id not in path


def test_few_shot_messages_of_the_client_do_not_break_the_chain(serve):
  """What the client made up is prompt; what was sampled after it still extends."""
  gateway, _, records = serve(CALL)
  client = Client(gateway, records, 'k')
  shots = [USER, {'role': 'assistant', 'content': 'so'}, USER]
  message, first = client.ask(shots)
  _, second = client.ask([*shots, message, *reply_to(message)])
  assert (first.fork_reason, second.parent) == (None, first.id)


def test_closed_session_is_forgotten(serve):
  """Closing a key frees its tree: the same history is a first request again."""
  gateway, _, records = serve(CALL)
  client = Client(gateway, records, 'k')
  _, _, history = first_two(client)
  gateway.sessions.close('k')
  _, record = client.ask(history)
  assert (record.parent, record.fork_reason, record.turn) == (None, None, 0)


# --- The law as a property.

texts = st.sampled_from(
  ['', 'a', ' look at it ', 'né ☃', '<invoke', '[e~[', '\n\n', '}{']
)
calls = st.lists(
  st.tuples(
    st.sampled_from(['sh', 'other', 'unknown']),
    st.dictionaries(st.sampled_from(['cmd', 'n', 'é']), texts, max_size=2),
  ),
  max_size=2,
)
well_formed = st.builds(response_text, texts, texts, calls)


@st.composite
def outputs(draw):
  """What a model might sample: as text, cut anywhere, or any ids at all."""
  kind = draw(st.sampled_from(['text', 'text', 'text', 'open', 'cut', 'ids', 'mixed']))
  if kind == 'ids':
    return draw(st.lists(st.integers(0, 499), max_size=12))
  text = draw(well_formed)
  if kind == 'open':  # a whole call, but the limit came before the end of message
    return response_text('x', draw(texts), [('sh', {'cmd': 'ls'})], end='')
  if kind == 'cut':
    return text[: draw(st.integers(0, len(text)))]
  if kind == 'mixed':
    return [text[:20], *draw(st.lists(st.integers(0, 499), min_size=1, max_size=4))]
  return text


ACTIONS = (
  *['faithful'] * 4,
  'branch',
  'again',
  'drop_reasoning',
  'edit_content',
  'edit_call',
  'insert_user',
  'other_tools',
  'new_system',
  'respell',
)


@pytest.fixture(scope='module')
def running(tok):
  """One gateway for all examples; each has a session of its own."""
  engine = ScriptedEngine(lambda request: ())
  records = []
  config = GatewayConfig(accept_unknown_keys=True, unknown_key_mode='training')
  with Gateway(config, tok, engine, records.append) as gateway:
    with httpx.Client(trust_env=False) as http:
      yield gateway, engine, records, http
  engine.close()


def plain(messages):
  """Messages as the client sent them, but for spellings that JSON or OpenAI equate."""
  return [(*said(message), thought(message)) for message in messages]


def said(message):
  calls = [
    (c['function']['name'], json.loads(c['function']['arguments']))
    for c in message.get('tool_calls') or ()
  ]
  content = message.get('content') or ''
  return (
    message['role'],
    content.strip() if message['role'][0] == 'a' else content,
    calls,
  )


def thought(message):
  return (message.get('reasoning_content') or '').strip()


def restored(history, known):
  """The history, with the reasoning of recorded answers where the client dropped it.

  Args:
    known: (tools, restored messages with the answer, record) of earlier requests.
  """
  result = []
  for message in history:
    if message['role'] == 'assistant' and not thought(message):
      ids = {call.get('id') for call in message.get('tool_calls') or ()}
      by_id = [full for _, full, _ in known if ids & call_ids(full[-1])]
      by_content = [
        full
        for _, full, _ in known
        if plain(full[:-1]) == plain(result) and said(full[-1]) == said(message)
      ]
      if any(not thought(full[-1]) for full in by_content):
        by_content = []
      source = (by_id or by_content or [[message]])[-1][-1]
      if thought(source):
        message = message | {'reasoning_content': source['reasoning_content']}
    result.append(message)
  return result


def call_ids(message):
  return {call['id'] for call in message.get('tool_calls') or ()}


@settings(
  deadline=None,
  suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_law_4(running, tok, data):
  """Any conversation, any output, any client: recorded ids are the only truth.

  Every recorded response is what the engine sampled; a prompt starts with its parent's
  ids or is the full encoding; which of the two, the oracle decides from the JSON alone;
  nothing is lost and the counters add up.
  """
  gateway, engine, records, http = running
  before = collections.Counter(gateway.counters())
  start, engine.results = len(records), []
  client = Client(gateway, records, f'session-{start}', http)
  known = []  # (tools, messages with the answer, record)
  system = (
    [{'role': 'system', 'content': 'Be brief.'}] if data.draw(st.booleans()) else []
  )
  history, tools = [*system, {'role': 'user', 'content': data.draw(texts)}], [SH]

  for _ in range(data.draw(st.integers(3, 7), label='turns')):
    action = data.draw(st.sampled_from(ACTIONS), label='action')
    history = copy.deepcopy(history)
    answers = [m for m in history if m['role'] == 'assistant']
    if action == 'branch' and known:
      tools, full, _ = data.draw(st.sampled_from(known))
      history = [*full, *reply_to(full[-1], data.draw(texts))]
    elif action == 'again' and known:
      tools, full, _ = data.draw(st.sampled_from(known))
      history = full[:-1]
    elif action == 'drop_reasoning' and answers:
      data.draw(st.sampled_from(answers)).pop('reasoning_content', None)
    elif action == 'edit_content' and answers:
      data.draw(st.sampled_from(answers))['content'] = data.draw(texts)
    elif action == 'edit_call' and answers:
      for call in answers[-1].get('tool_calls', ()):
        call['function']['arguments'] = '{"cmd": "rm"}'
    elif action == 'insert_user':
      history.append({'role': 'user', 'content': data.draw(texts)})
    elif action == 'other_tools':
      tools = data.draw(st.sampled_from([[SH], [OTHER], [SH, OTHER], []]))
    elif action == 'new_system' and history[0]['role'] == 'system':
      history[0]['content'] += '!'
    elif action == 'respell' and answers:
      for message in answers:
        message['content'] = message['content'] or None
        for call in message.get('tool_calls', ()):
          arguments = json.loads(call['function']['arguments'])
          call['function']['arguments'] = json.dumps(arguments, indent=1)

    output = data.draw(outputs(), label='output')
    parts = [output] if isinstance(output, str) else output
    ids = [i for p in parts for i in (tok.encode(p) if isinstance(p, str) else [p])]
    engine.script = lambda request, ids=ids: ids
    message, record = client.ask(history, tools, stream=data.draw(st.booleans()))
    request, result = engine.results[-1]

    # What was sampled is what was recorded.
    for recorded, sampled in (
      (record.prompt_ids, request.prompt_ids),
      (record.response_ids, result.tokens),
      (record.logprobs, result.logprobs),
      (record.versions, result.versions),
    ):
      np.testing.assert_array_equal(recorded, sampled, strict=True)
    assert record.turn == len(known)
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)

    # Extended or forked, as the JSON says.
    last = max(
      (i for i, m in enumerate(history) if m['role'] == 'assistant'), default=-1
    )
    full_history = restored(history, known)
    parents = {
      old.id: old
      for old in (
        r
        for t, m, r in known
        if t == tools and plain(m) == plain(full_history[: last + 1])
      )
    }  # fmt: skip
    closed = any(m['role'] == 'user' for m in history[last + 1 :])
    if parents and not closed:
      parent = parents[record.parent]
      ids = parent.tokens.tolist()
      assert record.fork_reason is None
      assert record.prompt_ids[: len(ids)].tolist() == ids
      full = chat.render(history, tools, True)
      head = chat.render(history[: last + 1], tools)
      assert full.startswith(head)
      scaffold = '\n' if parent.response_ids[-1:].tolist() == [tok.eos_id] else '[e~[\n'
      suffix = tok.decode(record.prompt_ids[len(ids) :])
      assert suffix == scaffold + full[len(head) :]
    else:
      assert record.parent is None
      assert (record.fork_reason is None) == (not known)
      pieces = chat.segments(full_history, tools, True)
      assert record.prompt_ids.tolist() == tokenizer_lib.encode_chat(tok, pieces).ids
      if parents:
        assert record.fork_reason == 'thinking_closed'
    known.append((tools, [*full_history, message], record))
    history = [*history, message, *reply_to(message, data.draw(texts))]

  # Nothing lost, nothing counted twice.
  new = records[start:]
  assert [r.response_ids.tolist() for r in new] == [
    result.tokens.tolist() for _, result in engine.results
  ]
  assert len({r.id for r in new}) == len(new) == len(known)
  delta = collections.Counter(gateway.counters())
  delta.subtract(before)
  reasons = collections.Counter(r.fork_reason for r in new if r.parent is None)
  reasons['first'] = reasons.pop(None)
  assert reasons['first'] == 1
  for reason in forks.REASONS:
    assert delta[f'forks_total{{reason="{reason}"}}'] == reasons[reason]
  assert delta['extensions_total'] == len(new) - reasons.total()
