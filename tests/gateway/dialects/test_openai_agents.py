"""openai-agents, unmodified, finishes a tool task in both of its dialects."""

from __future__ import annotations

import asyncio

import agents
import openai
import pytest

from tests.gateway import clients


def run(gateway, model_class) -> str:
  """The final output of an agent with one tool."""
  agents.set_tracing_disabled(True)

  async def task():
    async with openai.AsyncOpenAI(
      base_url=gateway.base_url, api_key='k', max_retries=0
    ) as client:
      sh = agents.function_tool(clients.shell, name_override='sh')
      agent = agents.Agent(
        name='counter',
        instructions='You count.',
        model=model_class('m2jax', client),
        tools=[sh],
      )
      return (await agents.Runner.run(agent, clients.QUESTION)).final_output

  return asyncio.run(task())


@pytest.mark.parametrize(
  'model_class', [agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel]
)
def test_a_tool_task(serve, tok, model_class):
  gateway, engine, records = serve(clients.script(tok))
  gateway.sessions.open('k')
  assert run(gateway, model_class) == clients.ANSWER
  assert len(records) == 3
  clients.assert_recorded(engine, records)
  if model_class is agents.OpenAIResponsesModel:
    clients.assert_extends(records)
