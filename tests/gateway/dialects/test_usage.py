"""Usage: what the engine found in its prefix cache, in the form of each dialect."""

from __future__ import annotations

import pytest

from tests.gateway import clients
from tests.gateway.conftest import response_text

ASK = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'q'}]}
ITEMS = {'model': 'm2jax', 'input': 'q'}


def chat(client, stream):
  create = client.chat.completions.create
  if not stream:
    return create(**ASK).usage
  options = {'include_usage': True}
  return list(create(**ASK, stream=True, stream_options=options))[-1].usage


def responses(client, stream):
  create = client.responses.create
  return (
    list(create(**ITEMS, stream=True))[-1].response.usage
    if stream
    else create(**ITEMS).usage
  )


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('cached', [None, 0, 7])
def test_cached_tokens(serve, cached, stream):
  """The real count; absent, and never 0, where the engine does not say."""
  gateway, engine, records = serve(
    response_text('t', 'fine'), engine_options={'cached_tokens': cached}
  )
  openai, anthropic = clients.openai_of(gateway), clients.anthropic_of(gateway)
  found = chat(openai, stream).model_dump(exclude_unset=True)
  prompt = len(records[-1].prompt_ids)
  details = {} if cached is None else {'cached_tokens': cached}
  assert found['prompt_tokens'] == prompt
  assert found.get('prompt_tokens_details', {}) == details
  found = responses(openai, stream).model_dump(exclude_unset=True)
  assert found['input_tokens'] == len(records[-1].prompt_ids)
  assert found['input_tokens_details'] == details
  if stream:
    with anthropic.messages.stream(**ASK, max_tokens=50) as events:
      usage = events.get_final_message().usage
  else:
    usage = anthropic.messages.create(**ASK, max_tokens=50).usage
  assert usage.input_tokens == len(records[-1].prompt_ids) - (cached or 0)
  assert usage.output_tokens == len(records[-1].response_ids)
  assert usage.cache_read_input_tokens == cached
