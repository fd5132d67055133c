"""The dialect, judged by the official client: what it sends and reads must work."""

import asyncio
import collections

import openai
import pytest

from tests.gateway import clients
from tests.gateway.conftest import SH, response_text

QUESTION = [{'role': 'user', 'content': 'count the lines of a.txt'}]
CALL = response_text('I should look', 'Ok', [('sh', {'cmd': 'wc -l <a.txt', 'n': 2})])


def collect(stream):
  """A stream's deltas added up, as an agent does it."""
  message = {'role': 'assistant', 'content': '', 'reasoning_content': ''}
  calls, finish, usage, status = {}, None, None, None
  for chunk in stream:
    usage = chunk.usage or usage
    for choice in chunk.choices:
      delta = choice.delta
      message['content'] += delta.content or ''
      message['reasoning_content'] += getattr(delta, 'reasoning_content', None) or ''
      for part in delta.tool_calls or ():
        call = calls.setdefault(
          part.index, {'id': part.id, 'name': '', 'arguments': ''}
        )
        call['name'] += part.function.name or ''
        call['arguments'] += part.function.arguments or ''
      finish = choice.finish_reason or finish
      status = getattr(choice, 'parse_status', status)
  if calls:
    message['tool_calls'] = [
      {
        'id': call['id'],
        'type': 'function',
        'function': {'name': call['name'], 'arguments': call['arguments']},
      }
      for call in calls.values()
    ]
  return message, finish, usage, status


def test_answer_with_tool_call(serve, tok):
  """Reasoning, content, typed arguments and usage arrive where the client looks."""
  gateway, engine, records = serve(CALL)
  reply = clients.openai_of(gateway).chat.completions.create(
    model='m2jax', messages=QUESTION, tools=[SH], max_tokens=500
  )
  [choice], [record] = reply.choices, records
  assert choice.finish_reason == 'tool_calls'
  assert choice.message.content == 'Ok'
  assert choice.message.reasoning_content == 'I should look'
  [call] = choice.message.tool_calls
  assert call.function.name == 'sh'
  assert call.function.arguments == '{"cmd": "wc -l <a.txt", "n": 2}'
  assert reply.id == record.id
  assert record.response_ids.tolist() == list(tok.encode(CALL))
  assert record.prompt_ids.tolist() == engine.requests[0].prompt_ids.tolist()
  assert reply.usage.prompt_tokens == len(record.prompt_ids)
  assert reply.usage.completion_tokens == len(record.response_ids)
  assert (record.turn, record.parent, record.fork_reason) == (0, None, None)
  assert record.status == 'ok'
  assert record.started_s <= record.ended_s


@pytest.mark.parametrize(
  'text',
  [
    CALL,
    response_text('né ☃', 'the é answer'),
    response_text(calls=[('sh', {'cmd': 'a'}), ('sh', {'cmd': 'b'})]),
    'never stops thinking',
    'x\n</think>\n\n<minimax:tool_call>no invoke</minimax:tool_call>[e~[',
    'x\n</think>\n\nhm\n<minimax:tool_call>\n<invoke name="sh">',
    '',
  ],
)
@pytest.mark.parametrize('piece_tokens', [1, 5])
def test_stream_adds_up_to_the_answer(serve, text, piece_tokens):
  """A streaming agent and a plain one see the same message and echo it alike."""
  gateway, _, records = serve(text, engine_options={'piece_tokens': piece_tokens})
  client = clients.openai_of(gateway)
  asked = {'model': 'm2jax', 'messages': QUESTION, 'tools': [SH]}
  plain = client.chat.completions.create(**asked).choices[0]
  message, finish, usage, status = collect(
    client.chat.completions.create(
      **asked, stream=True, stream_options={'include_usage': True}
    )
  )
  assert finish == plain.finish_reason
  assert status == plain.parse_status == records[-1].status
  assert message['content'] == (plain.message.content or '')
  assert message['reasoning_content'] == plain.message.reasoning_content
  said = [c.function.model_dump() for c in plain.message.tool_calls or ()]
  assert [c['function'] for c in message.get('tool_calls', ())] == said
  assert usage.completion_tokens == len(records[-1].response_ids)

  ids = [call['id'] for call in message.get('tool_calls', ())]
  answers = [{'role': 'tool', 'content': 'x', 'tool_call_id': id_} for id_ in ids]
  answers = answers or [{'role': 'user', 'content': 'x'}]
  client.chat.completions.create(**asked | {'messages': [*QUESTION, message, *answers]})
  expected = None if said else 'thinking_closed'
  assert records[-1].fork_reason == expected


def test_length(serve):
  """A response that hits its limit says so, and keeps what there is."""
  gateway, engine, records = serve('a long thought' * 20)
  reply = clients.openai_of(gateway).chat.completions.create(
    model='m2jax', messages=QUESTION, max_completion_tokens=7
  )
  assert reply.choices[0].finish_reason == records[0].finish_reason == 'length'
  assert reply.usage.completion_tokens == 7
  assert engine.requests[0].sampling.max_tokens == 7


def test_logprobs(serve, tok):
  """Log-probabilities on request are those of the sampled tokens, one for each."""
  gateway, _, records = serve(response_text('a', 'b'))
  reply = clients.openai_of(gateway).chat.completions.create(
    model='m2jax', messages=QUESTION, logprobs=True
  )
  entries = reply.choices[0].logprobs.content
  assert [e.logprob for e in entries] == records[0].logprobs.tolist()
  assert ''.join(e.token for e in entries) == tok.decode(records[0].response_ids)
  assert all(e.top_logprobs == [] for e in entries)


def test_bytes_of_parts_of_a_character(serve, tok):
  """A token may be a part of one: its bytes are its own, and add up to the text."""
  text = response_text('a', '\U0001f980 é ☃')
  gateway, _, records = serve(text)
  reply = clients.openai_of(gateway).chat.completions.create(
    model='m2jax', messages=QUESTION, logprobs=True
  )
  entries = reply.choices[0].logprobs.content
  assert any('\ufffd' in e.token for e in entries)
  assert b''.join(bytes(e.bytes) for e in entries).decode() == text


def test_top_logprobs(serve, tok):
  """The most likely tokens of each position, as many as asked for, likeliest first."""
  gateway, _, _ = serve(response_text('a', 'b'))
  reply = clients.openai_of(gateway).chat.completions.create(
    model='m2jax', messages=QUESTION, logprobs=True, top_logprobs=3
  )
  for entry in reply.choices[0].logprobs.content:
    likeliest = [(other.token, other.logprob) for other in entry.top_logprobs]
    assert likeliest == [(tok.decode([i]), -i) for i in range(3)]


def test_models_and_error_types(serve):
  """The client maps our errors to its own exception classes, with param and code."""
  gateway, _, _ = serve('x', accept_unknown_keys=False)
  gateway.sessions.open('known')
  client = clients.openai_of(gateway, 'known')
  assert [model.id for model in client.models.list()] == ['m2jax']
  with pytest.raises(openai.NotFoundError) as error:
    client.chat.completions.create(model='other', messages=QUESTION)
  assert (error.value.code, error.value.param) == ('model_not_found', 'model')
  with pytest.raises(openai.BadRequestError) as error:
    client.chat.completions.create(model='m2jax', messages=QUESTION, n=0)
  assert error.value.param == 'n'
  with pytest.raises(openai.AuthenticationError):
    clients.openai_of(gateway, 'unknown').chat.completions.create(
      model='m2jax', messages=QUESTION
    )
  with pytest.raises(openai.AuthenticationError):
    clients.openai_of(gateway, 'unknown').models.list()


def test_parallel_sessions_do_not_mix(serve, tok):
  """Many agents at once, some sharing a session: each gets its own answer."""

  def script(request):
    prompt = tok.decode(request.prompt_ids)
    name = prompt.rpartition('user\n')[2].partition('[e~[')[0]
    return tok.encode(response_text('t', f'for {name}'))

  gateway, _, records = serve(script)

  async def agent(i):
    async with openai.AsyncOpenAI(
      base_url=gateway.base_url, api_key=f's{i % 5}', max_retries=0
    ) as client:
      for turn in range(3):
        name = f'agent {i} turn {turn}'
        reply = await client.chat.completions.create(
          model='m2jax', messages=[{'role': 'user', 'content': name}]
        )
        assert reply.choices[0].message.content == f'for {name}'

  async def agents():
    await asyncio.gather(*map(agent, range(20)))

  asyncio.run(agents())
  assert len({record.id for record in records}) == len(records) == 60
  turns = collections.defaultdict(list)
  for record in records:
    turns[record.session].append(record.turn)
  assert [sorted(of) for of in turns.values()] == [list(range(12))] * 5
