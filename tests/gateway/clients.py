"""Real clients, a tool task of several turns, and what must hold of its records.

`CLIENTS` are the published packages, unmodified: each loop is how their documentation
uses them, or their own. Each takes a gateway and a key, and gives the final answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json

import anthropic
import openai

from tests.gateway.conftest import HTTP, SH, response_text

ANTHROPIC_HTTP = anthropic.DefaultHttpxClient(trust_env=False)  # as HTTP
QUESTION = 'count the lines of a.txt'
ANSWER = 'the answer is 3'
# What the model writes after 0, 1, … tool results; the second turn has parallel calls.
TURNS = {
  0: response_text('I should look', 'Ok', [('sh', {'cmd': 'ls <a', 'n': 2})]),
  1: response_text('both é', '', [('sh', {'cmd': 'wc a'}), ('sh', {'cmd': 'wc b'})]),
  3: response_text('I think', ANSWER),
}


def script(tok):
  """The task's model: it answers by the number of tool results in its prompt."""

  def answer(request):
    prompt = tok.decode(request.prompt_ids)
    return tok.encode(TURNS[prompt.count('\n<response>')])

  return answer


def shell(cmd: str, n: int = 0) -> str:
  """Run a shell command."""
  return f'3 {cmd} {n}'


def assert_recorded(engine, records) -> None:
  """Law 4: the records are what the engine was asked and sampled, token by token."""
  assert len(records) == len(engine.results)
  for record, (request, result) in zip(records, engine.results, strict=True):
    assert record.prompt_ids.tolist() == list(request.prompt_ids)
    assert record.response_ids.tolist() == result.tokens.tolist()
    assert record.logprobs.tolist() == result.logprobs.tolist()


def assert_extends(records) -> None:
  """Each prompt starts with the whole prompt and response before it."""
  for first, second in itertools.pairwise(records):
    known = first.tokens.tolist()
    assert second.prompt_ids[: len(known)].tolist() == known, second.fork_reason
    assert second.parent == first.id


def openai_of(gateway, key: str = 'k') -> openai.OpenAI:
  """OpenAI's client."""
  options = dict(max_retries=0, http_client=HTTP)
  return openai.OpenAI(base_url=gateway.base_url, api_key=key, **options)


def anthropic_of(gateway, key: str = 'k') -> anthropic.Anthropic:
  """Anthropic's client."""
  base_url = gateway.base_url.removesuffix('/v1')
  options = dict(max_retries=0, http_client=ANTHROPIC_HTTP)
  return anthropic.Anthropic(base_url=base_url, api_key=key, **options)


def openai_chat(gateway, key: str) -> str:
  client = openai_of(gateway, key)
  messages = [{'role': 'user', 'content': QUESTION}]
  while True:
    reply = client.chat.completions.create(
      model='m2jax', messages=messages, tools=[SH], max_tokens=200
    )
    message = reply.choices[0].message
    messages.append(message)
    if not message.tool_calls:
      return message.content
    for call in message.tool_calls:
      content = shell(**json.loads(call.function.arguments))
      messages.append({'role': 'tool', 'tool_call_id': call.id, 'content': content})


def openai_responses(gateway, key: str) -> str:
  client = openai_of(gateway, key)
  items = [{'role': 'user', 'content': QUESTION}]
  while True:
    response = client.responses.create(
      model='m2jax',
      input=items,
      tools=[{'type': 'function', **SH['function']}],
      max_output_tokens=200,
    )
    items += response.output
    calls = [item for item in response.output if item.type == 'function_call']
    if not calls:
      return response.output_text
    for call in calls:
      output = shell(**json.loads(call.arguments))
      items.append(
        {'type': 'function_call_output', 'call_id': call.call_id, 'output': output}
      )


def anthropic_runner(gateway, key: str) -> str:
  client = anthropic_of(gateway, key)
  runner = client.beta.messages.tool_runner(
    model='m2jax',
    max_tokens=200,
    messages=[{'role': 'user', 'content': QUESTION}],
    tools=[anthropic.beta_tool(shell, name='sh')],
  )
  return runner.until_done().content[-1].text


def _openai_agents(model_class: str):
  async def task(gateway, key: str) -> str:
    import agents  # slow

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(
      base_url=gateway.base_url, api_key=key, max_retries=0
    ) as client:
      agent = agents.Agent(
        name='counter',
        instructions='You count.',
        model=getattr(agents, model_class)('m2jax', client),
        model_settings=agents.ModelSettings(max_tokens=200),
        tools=[agents.function_tool(shell, name_override='sh')],
      )
      return (await agents.Runner.run(agent, QUESTION)).final_output

  return lambda gateway, key: asyncio.run(task(gateway, key))


CLIENTS = {
  'openai_chat': openai_chat,
  'openai_responses': openai_responses,
  'anthropic_runner': anthropic_runner,
  'agents_responses': _openai_agents('OpenAIResponsesModel'),
  'agents_chat': _openai_agents('OpenAIChatCompletionsModel'),
}
