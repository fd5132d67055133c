"""Template and parser against an independent implementation (make_golden.py)."""

import json
import pathlib

import pytest

from m2jax.text import chat

GOLDEN = pathlib.Path(__file__).parent / 'golden'
RENDER = json.loads((GOLDEN / 'render.json').read_text(encoding='utf-8'))
PARSE = json.loads((GOLDEN / 'parse.json').read_text(encoding='utf-8'))
IDS = {'ids': lambda case: case['name']}


def _render_arguments(case):
  return case['messages'], case['tools'], case['add_generation_prompt']


@pytest.mark.parametrize('case', RENDER, **IDS)
def test_render_equals_oracle(case):
  """Any byte off and a released M2 checkpoint sees a prompt it was not trained on."""
  assert chat.render(*_render_arguments(case)) == case['text']


@pytest.mark.parametrize('case', RENDER, **IDS)
def test_ownership_equals_oracle(case):
  """A wrong loss mask trains the model on the template or hides its own tokens.

  Two deliberate differences: the oracle counts a rendered `<think>\\n` as generated,
  while here it is part of the generation prompt; and the newline before a call without
  preceding text belongs to the template in the oracle, but to the model here.
  """
  oracle = ''.join(('1' if owned else '0') * len(text) for text, owned in case['runs'])
  pieces = chat.segments(*_render_arguments(case))
  ours = ''.join(('1' if p.owned else '0') * len(p.text) for p in pieces)
  text = case['text']
  expected = list(oracle)
  opening = ']~b]ai\n<think>\n'
  at = text.find(opening)
  while at >= 0:
    expected[at : at + len(opening)] = '0' * len(opening)
    at = text.find(opening, at + 1)
  opening = ']~b]ai\n\n<minimax:tool_call>'
  at = text.find(opening)
  while at >= 0:
    expected[at + len(']~b]ai\n')] = '1'
    at = text.find(opening, at + 1)
  assert ours == ''.join(expected)


@pytest.mark.parametrize('case', PARSE['cases'], **IDS)
def test_parse_equals_oracle(case):
  """Agents must get the calls that the reference parser would give them.

  Deliberate differences: only the template's own newlines are stripped; calls that must
  not be run are listed separately; a parameter that the schema does not declare is a
  string (the official guide), not a failed attempt at JSON.
  """
  message = chat.parse(case['text'], PARSE['tools'])
  assert message.reasoning.strip() == case['reasoning']
  assert message.content.strip() == case['content']
  ours = [(c.name, c.arguments, c.status) for c in message.tool_calls]
  ours += [(None, None, c.status) for c in message.broken_calls]
  oracle = [(c['name'], c['arguments'], c['status']) for c in case['tool_calls']]
  if case['name'] == 'typed':
    oracle = [(name, arguments, 'ok') for name, arguments, _ in oracle]
  assert ours == oracle
