"""A trained tokenizer and real gateways over loopback."""

import httpx
import pytest

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.text import chat, tokenizer
from tests.gateway.scripted_engine import ScriptedEngine

# One for all: each new client reads the certificates of the system, 20 ms.
HTTP = httpx.Client(trust_env=False, timeout=120)
SH = {
  'type': 'function',
  'function': {
    'name': 'sh',
    'description': 'Run a shell command.',
    'parameters': {
      'type': 'object',
      'properties': {'cmd': {'type': 'string'}, 'n': {'type': 'integer'}},
      'required': ['cmd'],
    },
  },
}


def response_text(reasoning='', content='', calls=(), end='[e~['):
  """What a model writes for a message, after the generation prompt."""
  text = f'{reasoning}\n</think>\n\n{content}'
  if calls:
    invokes = ''.join(
      f'<invoke name="{name}">\n'
      + ''.join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in args.items())
      + '</invoke>\n'
      for name, args in calls
    )
    text += f'\n<minimax:tool_call>\n{invokes}</minimax:tool_call>'
  return text + end


@pytest.fixture(scope='session')
def tok():
  messages = [
    {'role': 'user', 'content': 'count the lines of the file a.txt é ☃'},
    {
      'role': 'assistant',
      'content': 'the answer is 3',
      'reasoning_content': 'I think',
      'tool_calls': [{'function': {'name': 'sh', 'arguments': {'cmd': 'wc -l a.txt'}}}],
    },
    {'role': 'tool', 'content': '3 a.txt'},
  ]
  return tokenizer.train([chat.render(messages, [SH], True)] * 8, 500)


@pytest.fixture
def serve(tok):
  """`serve(script, **config) -> (gateway, engine, records)`, stopped at the end.

  `script` is a text, a list of ids, an exception or a function of the request.
  """
  running = []

  def start(script, *, record=None, engine_options=None, **config):
    if isinstance(script, str):
      script = tok.encode(script)
    answer = script if callable(script) else lambda request: script
    engine = ScriptedEngine(answer, **(engine_options or {}))
    records = []
    config = GatewayConfig(**{'accept_unknown_keys': True, **config})
    gateway = Gateway(config, tok, engine, record or records.append)
    running.append((gateway, engine))
    return gateway.start(), engine, records

  yield start
  for gateway, engine in running:
    gateway.stop()
    engine.close()
