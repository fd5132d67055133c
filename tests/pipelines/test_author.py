"""Every pipeline that takes an author model asks it; the others reject one."""

from __future__ import annotations

import asyncio
import json

import pytest

from m2jax.checks import InvalidSetting
from m2jax_pipelines import (
  appdev,
  discovery,
  installed,
  introduction,
  llm,
  reasoning,
  slides,
  spreadsheets,
)
from m2jax_pipelines.context import Context
from tests.pipelines.model_server import Server

ASKED = (
  'I keep the books of a small workshop, and the board meets on Friday. Please prepare '
  'what they want to see, so that nobody has to ask me afterwards.'
)
PIPELINES = {
  'appdev': appdev.Config(kinds=('counter',)),
  'slides': slides.Config(),
  'spreadsheets': spreadsheets.Config(),
}


def _first(config, directory, author):
  """The first candidate."""
  module = {'appdev': appdev, 'slides': slides, 'spreadsheets': spreadsheets}

  async def one():
    stream = module[config.kind].candidates(config, Context(directory, author))
    try:
      return await anext(stream)
    finally:
      await stream.aclose()

  return asyncio.run(one())


@pytest.fixture(params=PIPELINES)
def config(request, monkeypatch):
  """A pipeline's settings; its sandboxes' packages are not needed here."""
  if reason := discovery.unavailable(request.param):
    pytest.skip(reason)
  monkeypatch.setattr(installed, 'site', lambda *given: None)
  for name in ('openpyxl', 'pptx'):
    pytest.importorskip(name, reason='pip install -e ./m2jax_pipelines')
  return PIPELINES[request.param]


def test_the_author_opens_the_statement(config, tmp_path):
  """Its words come first, and every requirement stays as it is; the record says who."""
  plain = _first(config, tmp_path, llm.LLMClient(llm.LLMConfig(), 'author'))
  assert plain.facts['author'] == llm.SCRIPTED
  assert plain.draft.metadata.details['author'] == llm.SCRIPTED
  log = tmp_path / 'calls.jsonl'
  with Server(lambda body: ASKED) as server:
    author = llm.LLMClient(llm.LLMConfig(url=server.url, model='m'), 'author', log)
    told = _first(config, tmp_path, author)
  assert told.draft.instruction == f'{ASKED}\n\n{plain.draft.instruction}'
  assert plain.draft.instruction in server.bodies[0]['messages'][-1]['content']
  assert told.facts['author'] == told.draft.metadata.details['author'] == 'm'
  assert told.draft.tests == plain.draft.tests
  [call] = map(json.loads, log.read_text().splitlines())
  assert call['used'] and call['training'] is False


def test_an_opening_that_adds_something_is_not_used(config, tmp_path):
  with Server(lambda body: f'{ASKED} It needs a title of 7 words.') as server:
    author = llm.LLMClient(llm.LLMConfig(url=server.url, model='m'), 'author')
    told = _first(config, tmp_path, author)
  assert told.facts['author'] == llm.SCRIPTED and ASKED not in told.draft.instruction


@pytest.mark.parametrize(
  'text',
  [
    '',
    'Too short.',
    'x ' * 500,
    f'{ASKED} There must be 3 slides.',
    f'{ASKED} Call it "Report".',
    f'{ASKED} Write `deck.pptx`.',
    f'{ASKED}\n\n- and a list',
    f'# {ASKED}',
    f'<think>{ASKED}</think>',
  ],
)
def test_what_an_opening_must_not_have(text):
  assert introduction.acceptable(ASKED) and not introduction.acceptable(text)


def test_reasoning_refuses_an_author():
  """Its problems are the package's own texts: the error says what to change."""
  author = llm.LLMConfig(url='http://127.0.0.1:9/v1', model='m')
  with pytest.raises(InvalidSetting, match=r'Config\.author=.*without url'):
    reasoning.Config(author=author)
