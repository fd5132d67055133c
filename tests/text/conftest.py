"""A small corpus of shell chats, and the tokenizer trained on it."""

import random

import pytest

from m2jax.text import chat, tokenizer

TOOL = {
  'type': 'function',
  'function': {
    'name': 'sh',
    'parameters': {'type': 'object', 'properties': {'cmd': {'type': 'string'}}},
  },
}
SYLLABLES = (
  'ba', 'co', 'di', 'fu', 'ge', 'ho', 'ki', 'lu', 'mo', 'na', 'pe', 'ri', 'so', 'tu',
  've', 'wi', 'xa', 'yo', 'ze', 'tex', 'ard',
)  # fmt: skip


def name(rng: random.Random) -> str:
  return ''.join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def demonstration(rng: random.Random) -> list[dict]:
  """One tool cycle: a question about a file, a command, its output, an answer."""
  file, word, count = f'{name(rng)}.py', name(rng), rng.randrange(200)
  question, thought, command, output, answer = rng.choice(
    [
      (
        f'How many lines of {file} contain {word}?',
        f'I count the lines of {file} that contain {word}.',
        f'grep -c {word} {file}',
        f'{count}\n',
        f'{count}',
      ),
      (
        f'Which file in lib/ defines the function {word}_{count}?',
        'I search the definitions.',
        f"grep -l 'def {word}_{count}(' lib/*.py",
        f'lib/{file}\n',
        file,
      ),
    ]
  )
  function = {'name': 'sh', 'arguments': {'cmd': command}}
  return [
    {'role': 'system', 'content': 'Answer questions about files with the shell.'},
    {'role': 'user', 'content': question},
    {
      'role': 'assistant',
      'content': None,
      'reasoning_content': thought,
      'tool_calls': [{'id': 'c1', 'type': 'function', 'function': function}],
    },
    {'role': 'tool', 'tool_call_id': 'c1', 'content': output},
    {'role': 'assistant', 'content': answer, 'reasoning_content': 'The output says.'},
  ]


@pytest.fixture(scope='session')
def tool() -> dict:
  return TOOL


@pytest.fixture(scope='session')
def demonstrations() -> list[list[dict]]:
  rng = random.Random(0)
  return [demonstration(rng) for _ in range(400)]


@pytest.fixture(scope='session')
def texts(demonstrations) -> list[str]:
  return [chat.render(messages, [TOOL]) for messages in demonstrations]


@pytest.fixture(scope='session')
def trained(texts) -> tokenizer.Tokenizer:
  return tokenizer.train(texts, 768)
