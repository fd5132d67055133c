"""n, stop strings and streamed log-probabilities of OpenAI's chat completions."""

from __future__ import annotations

import openai
import pytest

from tests.gateway import clients
from tests.gateway.conftest import HTTP, SH, response_text

QUESTION = [{'role': 'user', 'content': 'count the lines of a.txt'}]


def ask(gateway, **fields):
  return clients.openai_of(gateway).chat.completions.create(
    **{'model': 'm2jax', 'messages': QUESTION, **fields}
  )


@pytest.mark.parametrize('top', [0, 2])
def test_streamed_logprobs_are_those_of_the_answer(serve, top):
  """Each sampled token once, in order, while the text streams."""
  gateway, _, records = serve(response_text('a thought', 'an answer'))
  asked = {'logprobs': True, 'top_logprobs': top}
  plain = ask(gateway, **asked).choices[0].logprobs.content
  chunks = [c.choices[0] for c in ask(gateway, **asked, stream=True)]
  streamed = [e for c in chunks if c.logprobs for e in c.logprobs.content]
  assert streamed == plain
  assert [e.logprob for e in streamed] == records[0].logprobs.tolist()
  assert all(len(e.top_logprobs) == top for e in streamed)
  first = next(i for i, c in enumerate(chunks) if c.delta.content)
  assert any(c.logprobs for c in chunks[:first])  # before the answer's first word


@pytest.mark.parametrize('stream', [False, True])
def test_n_choices_are_n_completions(serve, tok, stream):
  """Each choice is sampled, recorded and continued as a completion of its own."""
  count = iter(range(10))

  def script(request):
    call = [('sh', {'cmd': f'ls {next(count)}'})]
    return tok.encode(response_text('t', 'hm', call))

  gateway, engine, records = serve(script)
  asked = {'n': 3, 'tools': [SH], 'seed': 7}
  if stream:
    calls = {}
    for chunk in ask(gateway, **asked, stream=True):
      for choice in chunk.choices:
        for call in choice.delta.tool_calls or ():
          calls[choice.index] = call
  else:
    reply = ask(gateway, **asked)
    calls = {c.index: c.message.tool_calls[0] for c in reply.choices}
    used = sum(len(record.response_ids) for record in records)
    assert reply.usage.completion_tokens == used
  assert len(records) == len({r.id for r in records}) == len(engine.requests) == 3
  assert [r.sampling.seed for r in engine.requests] == [7, 8, 9]
  assert gateway.counters()['forks_total{reason="first"}'] == 1
  said = {call.id: call.function.arguments for call in calls.values()}
  assert len(said) == 3
  for record in list(records):  # the ids of a choice's calls lead to its completion
    call_id = f'call_{record.id.removeprefix("chatcmpl-")}_0'
    message = {
      'role': 'assistant', 'content': 'hm', 'reasoning_content': 't',
      'tool_calls': [{'id': call_id, 'type': 'function', 'function': {
        'name': 'sh', 'arguments': said[call_id]}}],
    }  # fmt: skip
    result = {'role': 'tool', 'content': 'x', 'tool_call_id': call_id}
    ask(gateway, messages=[*QUESTION, message, result], tools=[SH])
    assert records[-1].parent == record.id


TEXT = response_text('Observation: not here', 'See. Observation: 3\nmore')
STOP = 'Observation:'


@pytest.mark.parametrize('mode', ['training', 'evaluation'])
@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('piece_tokens', [1, 4])
def test_a_stop_string_ends_the_content(serve, tok, mode, stream, piece_tokens):
  """The client sees what is before it; recorded is up to the token that completes it,
  sampled as it was. What the engine drew after it is dropped."""
  gateway, engine, records = serve(TEXT, engine_options={'piece_tokens': piece_tokens})
  gateway.sessions.open('s', mode)
  create = clients.openai_of(gateway, 's').chat.completions.create
  reply = create(
    model='m2jax', messages=QUESTION, stop=['nothing', STOP], stream=stream
  )
  if stream:
    choices = [chunk.choices[0] for chunk in reply]
    content = ''.join(c.delta.content or '' for c in choices)
    reason = choices[-1].finish_reason
  else:
    content = reply.choices[0].message.content
    reason = reply.choices[0].finish_reason
  assert (content, reason) == ('See. ', 'stop')
  [record] = records
  assert record.finish_reason == 'stop' and record.overrides == ()
  sampled = engine.results[0][1]
  size = len(record.response_ids)
  assert record.response_ids.tolist() == sampled.tokens[:size].tolist()
  assert record.logprobs.tolist() == sampled.logprobs[:size].tolist()
  text = tok.decode(record.response_ids)
  shorter = tok.decode(record.response_ids[:-1])
  assert text.count(STOP) == 2 and shorter.count(STOP) == 1


def test_a_stopped_engine_does_no_more(serve):
  """A completion that has its stop string is cancelled, whether streamed or not."""
  text = response_text('t', 'a stop ' + 'word ' * 2000)
  gateway, engine, records = serve(text, engine_options={'delay_s': 0.005})
  for stream in (False, True):
    reply = ask(gateway, stop='stop', stream=stream, max_tokens=5000)
    if stream:
      list(reply)
  assert engine.cancelled['requests'] == 2
  assert all(len(result.tokens) < 1000 for _, result in engine.results)
  assert {record.finish_reason for record in records} == {'stop'}


@pytest.mark.parametrize('stop', [['\n\nb'], ['zz'], ['xxy']])
def test_text_that_begins_a_stop_string_is_not_lost(serve, tok, stop):
  """Held back while it may be one, and sent when it is not."""
  gateway, engine, _ = serve('')
  for text in ('a\n\nc', 'a z', 'a xx', 'xxxxz', 'zy\n'):
    engine.script = lambda _, text=text: tok.encode(response_text('t', text))
    content = ask(gateway, stop=stop).choices[0].message.content
    streamed = ask(gateway, stop=stop, stream=True)
    assert ''.join(c.choices[0].delta.content or '' for c in streamed) == content
    assert content == text


def test_unknown_fields_are_counted(serve):
  gateway, _, _ = serve(response_text('t', 'fine'))
  ask(gateway, extra_body={'cache_salt': 'x'})
  ask(gateway, user='me', store=False, metadata={}, reasoning_effort='high')
  assert gateway.counters()['ignored_total{field="unknown"}'] == 1


def _known_to_litellm(message: str) -> bool:
  return "this model's maximum context length is" in message.lower()


def _litellm(message: str) -> bool:
  from litellm.litellm_core_utils import exception_mapping_utils  # slow

  check = exception_mapping_utils.ExceptionCheckers
  return check.is_error_str_context_window_exceeded(message)


@pytest.mark.parametrize(
  'exceeded', [_known_to_litellm, pytest.param(_litellm, marks=pytest.mark.long)]
)
def test_a_long_prompt_is_worded_for_litellm(serve, exceeded):
  """litellm, and so mini-swe-agent, finds it by its wording only."""
  gateway, _, _ = serve('x', engine_options={'context_tokens': 300})
  for size in (150, 3000):  # refused by the engine, and before encoding
    with pytest.raises(openai.BadRequestError) as error:
      ask(gateway, messages=[{'role': 'user', 'content': '~ ' * size}])
    assert error.value.code == 'context_length_exceeded'
    assert exceeded(str(error.value))


def test_silence_is_filled_with_pings(serve):
  """A comment line, which clients skip, keeps a slow stream open."""
  gateway, _, _ = serve(
    response_text('t', 'ok'), ping_s=0.02, engine_options={'delay_s': 0.05}
  )
  reply = HTTP.post(
    gateway.base_url + '/chat/completions',
    json={'model': 'm2jax', 'messages': QUESTION, 'stream': True},
    headers={'authorization': 'Bearer k'},
  )
  assert reply.text.count(': ping\n\n') >= 2
  streamed = ask(gateway, stream=True)
  assert ''.join(c.choices[0].delta.content or '' for c in streamed) == 'ok'
