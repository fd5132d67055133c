"""Each style of client keeps its prefix: the next prompt begins with all recorded ids.

The clients here send what real ones send (facts/clients-and-peers.md §1): reasoning
under any name or none, system messages after tool results, billing headers, retries.
"""

import copy
import json

import pytest

from m2jax.gateway import messages as messages_lib
from tests.gateway.conftest import SH, response_text
from tests.gateway.test_history import Client, first_two, reply_to

USER = {'role': 'user', 'content': 'count'}
TURNS = 4


def keep(message):
  return message


def renamed(name, wrap=lambda text: text):
  """A client that returns the reasoning in another field."""

  def change(message):
    message[name] = wrap(message.pop('reasoning_content'))
    return message

  return change


def inline(message):
  thought = message.pop('reasoning_content')
  message['content'] = f'<think>\n{thought}\n</think>\n\n{message["content"] or ""}'
  return message


def in_parts(message):
  thought = {'type': 'thinking', 'thinking': message.pop('reasoning_content')}
  text = {'type': 'text', 'text': message['content'] or ''}
  message['content'] = [thought | {'signature': 's'}, text]
  return message


def both(message):
  message['reasoning'] = message['reasoning_content']
  details = {'type': 'reasoning.text', 'text': message['reasoning_content']}
  message['reasoning_details'] = [details, {'type': 'reasoning.encrypted', 'data': 'x'}]
  return message


def drop(message):
  del message['reasoning_content']
  return message


def drop_and_rename_calls(message):
  """Known by its content alone."""
  for i, call in enumerate(message['tool_calls']):
    call['id'] = f'mine-{i}'
  return drop(message)


def strip(message):
  message['content'] = (message['content'] or '').strip()
  return message


STYLES = {
  'reasoning_content': keep,
  'reasoning': renamed('reasoning'),
  'reasoning_details': renamed(
    'reasoning_details', lambda text: [{'type': 'reasoning.text', 'text': text}]
  ),
  'thinking': renamed('thinking'),
  'thinking_blocks': renamed(
    'thinking_blocks', lambda text: [{'type': 'thinking', 'thinking': text}]
  ),
  'inline': inline,
  'parts': in_parts,
  'all at once': both,
  'dropped': drop,
  'dropped, other call ids': drop_and_rename_calls,
  'stripped': strip,
}


def answers(tok):
  """A different call, with its reasoning, for each turn."""
  turn = iter(range(1000))

  def script(request):
    i = next(turn)
    return tok.encode(
      response_text(f'idea {i}', f' I run {i} ', [('sh', {'cmd': 'l'})])
    )

  return script


@pytest.mark.parametrize('style', STYLES)
def test_the_next_prompt_begins_with_the_last_one(serve, tok, style):
  """Law 4 for the ways in which clients respell a conversation, and no thought lost."""
  gateway, engine, records = serve(answers(tok))
  for late_system in (False, True):
    engine.script = answers(tok)
    records.clear()
    client = Client(gateway, records, f'key-{late_system}')
    history = [{'role': 'system', 'content': 'Be brief.'}, USER]
    for turn in range(TURNS):
      message, record = client.ask(history)
      if turn:
        known = records[-2].tokens.tolist()
        assert record.prompt_ids[: len(known)].tolist() == known
        assert record.parent == records[-2].id
      text = tok.decode(record.prompt_ids)
      thoughts = [f'idea {i}' in text for i in range(TURNS)]
      assert thoughts == [i < turn for i in range(TURNS)]
      results = reply_to(message)
      history += [STYLES[style](copy.deepcopy(message)), *results]
      if style.endswith('call ids'):
        results[0]['tool_call_id'] = 'mine-0'
      if late_system:
        left = f'<total_tokens>{1000 - turn}</total_tokens>'
        history.append({'role': 'system', 'content': left})
  counters = gateway.counters()
  assert counters['extensions_total'] == 2 * (TURNS - 1)
  assert counters['forks_total{reason="first"}'] == 2
  # Each message counts once, however often it comes back.
  dropped = 2 * (TURNS - 1) if 'dropped' in style else 0
  assert counters.get('reasoning_restored_total', 0) == dropped


def test_a_retry_gets_the_same_prompt(serve, tok):
  """A client that sends a request again branches from the same ids, and is counted."""
  gateway, _, records = serve(answers(tok))
  client = Client(gateway, records, 'k')
  _, _, history = first_two(client)
  client.ask(history)
  client.ask(history)
  client.ask([USER])
  _, second, third, first_again = records
  assert second.prompt_ids.tolist() == third.prompt_ids.tolist()
  assert second.parent == third.parent == records[0].id
  assert first_again.prompt_ids.tolist() == records[0].prompt_ids.tolist()
  counters = gateway.counters()
  assert counters['repeated_total'] == 2
  assert counters['forks_total{reason="resampled"}'] == 1


@pytest.mark.parametrize('tools', [[SH], []], ids=['same tools', 'no tools'])
@pytest.mark.parametrize('change', [drop, drop_and_rename_calls])
def test_an_edited_history_keeps_its_reasoning(serve, tok, tools, change):
  """A fork encodes all messages; the reasoning comes from the recorded ids."""
  gateway, _, records = serve(answers(tok))
  client = Client(gateway, records, 'k')
  message, _, history = first_two(client)
  second, _ = client.ask(history)
  history = [*history, second, *reply_to(second)]
  for i in (1, 3):
    history[i] = change(copy.deepcopy(history[i]))
  history[4]['content'] = 'an edited result'
  history[4]['tool_call_id'] = history[3]['tool_calls'][0]['id']
  history[2]['tool_call_id'] = history[1]['tool_calls'][0]['id']
  if tools:  # an edit before the last answer
    history[2]['content'] = 'another one'
  _, record = client.ask(history, tools)
  text = tok.decode(record.prompt_ids)
  assert record.parent is None
  assert record.fork_reason == ('history_rewritten' if tools else 'tools_changed')
  assert 'idea 0' in text
  # After an edit, only call ids tell which completion an answer is.
  assert ('idea 1' in text) == (change is drop or not tools)


def test_reasoning_is_not_given_to_other_answers(serve, tok):
  """The same words elsewhere, or an answer that had no reasoning, stay as they are."""
  gateway, engine, records = serve(response_text('secret', 'ok'))
  client = Client(gateway, records, 'k')
  client.ask([USER])
  other = [{'role': 'user', 'content': 'else'}, {'role': 'assistant', 'content': 'ok'}]
  _, record = client.ask([*other])
  assert 'secret' not in tok.decode(record.prompt_ids)
  # The same request once more, answered without reasoning.
  engine.script = lambda request: tok.encode('\n</think>\n\nok[e~[')
  client.ask([USER])
  _, record = client.ask([USER, {'role': 'assistant', 'content': 'ok'}])
  assert record.parent == records[2].id
  assert 'secret' not in tok.decode(record.prompt_ids)
  assert 'reasoning_restored_total' not in gateway.counters()


def test_billing_headers_do_not_reach_the_prompt(serve, tok):
  """Claude Code's first line has a hash of the request: each prompt would be new."""
  gateway, _, records = serve(answers(tok))
  client = Client(gateway, records, 'k')

  def system(cch, parts):
    line = f'x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={cch};'
    if parts:
      content = [{'type': 'text', 'text': line}, {'type': 'text', 'text': 'You are.'}]
    else:
      content = f'{line}\nYou are.'
    return {'role': 'system', 'content': content}

  message, first = client.ask([system('0a1b2', True), USER])
  history = [system('3c4d5', False), USER, message, *reply_to(message)]
  _, second = client.ask(history)
  assert second.parent == first.id
  text = tok.decode(second.prompt_ids)
  assert 'billing' not in text and 'system\nYou are.' in text
  assert gateway.counters()[f'ignored_total{{field="{messages_lib.BILLING}"}}'] == 2
  # Text about such a line is text.
  quoted = 'Strip the line\nx-anthropic-billing-header: cch=1;'
  assert messages_lib.without_billing(quoted) == quoted


def test_what_a_server_adds_to_a_tool_forks_nothing(serve, tok):
  """`strict` and cache marks move between requests; the prompt's tools are the same."""
  gateway, _, records = serve(answers(tok))
  client = Client(gateway, records, 'k')
  _, first, history = first_two(client)
  marked = copy.deepcopy(SH)
  marked['function']['strict'] = True
  marked['cache_control'] = {'type': 'ephemeral'}
  _, second = client.ask(history, [marked])
  assert second.parent == first.id
  assert 'strict' not in tok.decode(second.prompt_ids)


@pytest.mark.parametrize('stream', [False, True])
def test_text_after_a_call_reaches_the_client(serve, tok, stream):
  """It is content, streamed or not; and its ids are the history."""
  text = response_text('r', 'I look.', [('sh', {'cmd': 'ls'})], end=' and wait[e~[')
  gateway, _, records = serve(text)
  client = Client(gateway, records, 'k')
  message, first = client.ask([USER], stream=stream)
  assert message['content'] == 'I look.\nand wait'
  assert json.loads(message['tool_calls'][0]['function']['arguments']) == {'cmd': 'ls'}
  _, second = client.ask([USER, message, *reply_to(message)])
  assert second.parent == first.id


def test_a_turn_costs_its_new_tokens(serve, tok):
  """Only what follows the last answer is encoded, also for a client that drops
  reasoning: the encoder is given no more text, however long the history is."""
  gateway, _, records = serve(answers(tok))
  client = Client(gateway, records, 'k')
  encoded = []
  tokenizer = gateway._service.tokenizer
  fewest = tokenizer.fewest_tokens
  tokenizer.fewest_tokens = lambda text: encoded.append(len(text)) or fewest(text)
  try:
    history = [USER]
    for _ in range(12):
      message, _ = client.ask(history)
      history += [drop(message), *reply_to(message)]
  finally:
    del tokenizer.fewest_tokens
  assert encoded[0] > 100
  assert len(set(encoded[1:])) == 1 and encoded[1] < 100
