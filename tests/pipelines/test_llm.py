"""An LLM client: an answer is used, rejected or asked for again, and whatever the model
does ends no run and loses no candidate."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time

import pytest

from m2jax import sandbox
from m2jax_pipelines import appdev, installed, llm, make, records
from m2jax_pipelines.appdev import query
from m2jax_pipelines.context import Context
from m2jax_pipelines.source import Tasks
from tests.pipelines import toy
from tests.pipelines.model_server import Server
from tests.waiting import wait_until

GOOD = (
  'I run a small bakery with my sister, and we need this for our weekly planning on '
  'Monday mornings. Please keep it simple.'
)
REFUSAL = (
  "I'm sorry, but I can't help with that request about tinycalc. Please ask me "
  'something else that I could help you with instead.'
)
THINKING = '<think>\nThe user wants a text, which I should write.\n</think>\n\n'


def _no_wait(patch):
  patch.setattr(llm, '_RETRY_S', 0.0)


def _client(server, role='author', log=None, **options):
  config = llm.LLMConfig(**{'url': server.url, 'model': 'm', 'timeout_s': 5} | options)
  return llm.LLMClient(config, role, log)


def _write(who):
  ask = [{'role': 'user', 'content': 'hello'}]
  return asyncio.run(who.write(ask, lambda: 'plan B'))


@pytest.mark.parametrize(
  'answer, text',
  [
    (GOOD, GOOD),
    (THINKING + GOOD, GOOD),
    (f'It wants a text.</think>{GOOD}', GOOD),  # the template wrote <think>
    (f'```markdown\n{GOOD}\n```', GOOD),
    (f'Like this:\n```python\nx\n```\n{GOOD}', None),
    ([{'type': 'text', 'text': GOOD}], GOOD),
    ([{'type': 'thinking', 'thinking': 'Hm.'}, {'type': 'text', 'text': GOOD}], GOOD),
    ('{"a": {"quote": "I cannot help you"}}', None),
    ("I'm sorry to bother you, but `total` is wrong.", None),
    (f'<think>{GOOD}', ''),  # cut off
    (REFUSAL, ''),
    ('As an AI language model, I have no bakery.', ''),
    ('Unfortunately I am unable to write that.', ''),
    ('抱歉，我无法提供帮助。', ''),
    ({'content': None, 'refusal': 'No.'}, ''),
    ({'content': GOOD, 'refusal': 'No.'}, ''),
    ({'content': None}, ''),
    ('\x00\ufffd{{{[[' * 40, ''),
    (GOOD * 10_000, ''),
    (b'{"choices": [{"message": {"content": "\\ud800 a lone surrogate"}}]}', ''),
  ],
)
def test_what_a_model_says(answer, text, tmp_path):
  """Its thinking, a fence around all of it, refusals and noise become no statement."""
  log = tmp_path / 'calls.jsonl'
  with Server(lambda body: answer) as server:
    found = _write(_client(server, log=log))
  text = answer if text is None else text
  assert found == (llm.Text(text, 'm') if text else llm.Text('plan B', 'scripted'))
  (row,) = map(json.loads, log.read_text().splitlines())
  assert row['training'] is False and row['role'] == 'author'
  assert row['used'] is bool(text)


@pytest.mark.parametrize('end', ['length', 'content_filter'])
def test_a_text_that_was_cut_off_is_not_used(end):
  with Server(lambda body: GOOD, end) as server:
    assert _write(_client(server)).by == llm.SCRIPTED


def _silent(body):
  time.sleep(1)
  return GOOD


# What is no answer: of the server, of what is before it, or of the wrong key.
OUTAGES = {
  **{str(status): lambda body, s=status: s for status in (500, 502, 429, 401, 404)},
  'timeout': _silent,
  'html': lambda body: b'<html>gateway</html>',
  'no choices': lambda body: b'{"choices": []}',
  'no message': lambda body: b'{"choices": [{"message": null}]}',
  'nested': lambda body: b'[' * 100_000,
}


@pytest.mark.parametrize('name', OUTAGES)
def test_no_answer_is_no_text(name, tmp_path, monkeypatch):
  """It is an infrastructure failure, after retries where these can help."""
  _no_wait(monkeypatch)
  log = tmp_path / 'calls.jsonl'
  with Server(OUTAGES[name]) as server:
    who = _client(server, log=log, retries=2, timeout_s=0.3)
    with pytest.raises(llm.NoAnswer, match=f"author 'm' at {server.url}"):
      _write(who)
    wanted = 1 if name in ('401', '404') else 3
    wait_until(lambda: len(server.bodies) >= wanted)  # read after the client gave up
    assert len(server.bodies) == wanted
  (row,) = map(json.loads, log.read_text().splitlines())
  assert row['training'] is False and not row['used'] and server.url in row['error']


def test_a_passing_outage_is_waited_for(monkeypatch):
  _no_wait(monkeypatch)
  answers = iter([503, b'', GOOD])
  with Server(lambda body: next(answers)) as server:
    assert _write(_client(server)).text == GOOD


def _run(config, workdir, count):
  config = dataclasses.replace(config, count=count)
  return asyncio.run(make.run(config, workdir, show=False))


def test_an_outage_of_the_author_burns_no_candidate(tmp_path, monkeypatch):
  """The run ends with the reason, and the next one tries the same ids again."""
  monkeypatch.setattr(make, '_MAX_INVALID', 3)
  with Server(lambda body: 500) as server:
    author = llm.LLMConfig(server.url, 'm', timeout_s=5, retries=0)
    config = toy.Config(kinds='m' * 6, author=author)
    with pytest.raises(sandbox.SandboxError, match='3 candidates in a row.*HTTP 500'):
      _run(config, tmp_path, 2)
    rows = records.read(tmp_path / 'records.jsonl')
    assert [row['outcome'] for row in rows] == ['invalid'] * 3
    assert (tmp_path / 'report.html').exists()
    server.answer = lambda body: 'Please: ' + body['messages'][-1]['content']
    assert _run(config, tmp_path, 2).tasks == 2
  rows = records.read(tmp_path / 'records.jsonl')[3:]
  admitted = {row['id'] for row in rows if row['outcome'] == 'admitted'}
  assert admitted == {'sum/0', 'sum/1'}
  made = Tasks(tmp_path, 'train')[0].directory
  assert made.instruction.startswith('Please: ')


def _judgement(holds=True, quote='plain HTML, CSS and JavaScript'):
  quotes = {item.id: quote for item in query.RUBRIC}
  return json.dumps({k: {'holds': holds, 'quote': v} for k, v in quotes.items()})


_changing = iter([True, False] * 50)
# Mode of the judge → whether its candidate is made, and what it says instead.
MODES = {
  'good': (True, lambda good: good),
  'think': (True, lambda good: THINKING + good),
  'fence': (True, lambda good: f'```json\n{good}\n```'),
  'list': (True, lambda good: [{'type': 'text', 'text': good}]),
  'garbage': (False, lambda good: '\x00\ufffd{{{[[' * 40),
  'refusal': (False, lambda good: REFUSAL),
  'differ': (
    False,
    lambda good: good.replace('true', 'false') if next(_changing) else good,
  ),
  'huge': (False, lambda good: good * 10_000),
  'null': (False, lambda good: {'content': None}),
  'timeout': (False, lambda good: _silent(None)),
  '500': (False, lambda good: 500),
  '429': (False, lambda good: 429),
}


@pytest.mark.parametrize('mode', MODES)
def test_a_judge_ends_no_run(mode, tmp_path, monkeypatch):
  """Whatever it answers, its candidate is made, or tried again by the next run."""
  if reason := appdev.unavailable():
    pytest.skip(reason)
  monkeypatch.setattr(installed, 'site', lambda *given: None)
  is_made, change = MODES[mode]

  def answer(body):
    judges = 'You judge a document' in body['messages'][0]['content']
    return change(_judgement()) if judges else GOOD

  async def one(config, context):
    stream = appdev.candidates(config, context)
    try:
      return await anext(stream)
    finally:
      await stream.aclose()

  with Server(answer) as server:
    model = llm.LLMConfig(server.url, 'm', timeout_s=0.5, retries=0)
    config = appdev.Config(kinds=('counter',), judge=model)
    author = _client(server, retries=0)
    made = asyncio.run(one(config, Context(tmp_path, author)))
  assert made.invalid is not is_made, made.reason
  if is_made:
    assert not made.reason and made.draft.instruction.startswith(GOOD)
    assert made.facts['judge'] == 'm'
  else:
    assert made.draft is None and made.reason.startswith('judge')
