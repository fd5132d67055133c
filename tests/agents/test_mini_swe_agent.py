"""mini-swe-agent, unmodified from PyPI, in a sandbox behind the gateway."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from configs import forge_blackbox
from experiments import common
from m2jax import sandbox, tasks
from m2jax.agents import episodes
from m2jax.forge import authored
from m2jax.forge.config import ForgeConfig
from m2jax.tasks import terminal
from tests.agents.environment import needs_environment
from tests.gateway.conftest import response_text

pytestmark = needs_environment

STUCK = 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {}'


@pytest.fixture(scope='module')
def config():
  values = forge_blackbox.get_config('smoke').to_dict()
  return common.build(ForgeConfig, values)


def test_it_solves_a_task_of_several_turns(config, serve, tok):
  """Each recorded token is the engine's, in one chain of prompts that extend the last:
  the agent sends thinking and calls back as it got them, and nothing is retokenised."""
  spec = terminal.spec('train', 3, family='steps_3')
  task = terminal.make(spec)

  def policy(request):
    prompt = tok.decode(request.prompt_ids)
    observations = re.findall('<response>(.*?)</response>', prompt, re.DOTALL)
    lesson = terminal.FAMILIES[task.family].teach(task.params, lambda kind: False)
    try:
      for printed in [None, *observations]:
        thought, command = lesson.send(printed)
    except StopIteration as end:
      thought, command = end.value.thought, STUCK.format(end.value.content)
    call = ('bash', {'command': command})
    return tok.encode(response_text(thought, calls=[call]))

  gateway, engine, records = serve(policy, accept_unknown_keys=False)
  with episodes.Runner(config.episodes, gateway.base_url, gateway.sessions) as runner:
    [t] = runner.group(spec, 1).result(120)
  assert (t.end_reason, t.success, t.error) == ('answer', 1.0, '')
  assert len(records) == task.baseline_calls + 1
  assert [r.parent for r in records] == [None, *(r.id for r in records[:-1])]
  for record, (request, result) in zip(records, engine.results, strict=True):
    assert record.prompt_ids.tolist() == list(request.prompt_ids)
    assert record.response_ids.tolist() == result.tokens.tolist()
    assert record.logprobs.tolist() == result.logprobs.tolist()
  for before, after in zip(records, records[1:], strict=False):
    assert after.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()
  assert [m['role'] for m in t.messages[:3]] == ['system', 'user', 'assistant']
  assert all(m['reasoning_content'] for m in t.messages if m['role'] == 'assistant')


@pytest.mark.long
def test_demonstrations_are_what_it_sends(config):
  """A perfect author's demonstrations succeed, and their chats have the agent's own
  tool and prompts; two tasks at once are not mixed up."""
  specs = [terminal.spec('train', i, family='steps_2') for i in range(2)]
  teacher = terminal.TeacherConfig(scale=0.0)

  async def make():
    try:
      return await authored.collect(specs, teacher, config.episodes)
    finally:
      await sandbox.shutdown()

  found = asyncio.run(make())
  assert [d.success for d in found] == [1.0, 1.0]
  for demonstration in found:
    task = tasks.make(demonstration.task)
    messages = demonstration.messages
    assert messages[0] == {'role': 'system', 'content': 'Use bash.'}
    assert messages[1] == {'role': 'user', 'content': task.instruction}
    assert [t['function']['name'] for t in demonstration.tools] == ['bash']
    calls = [c for m in messages for c in m.get('tool_calls') or ()]
    assert len(calls) == task.baseline_calls + 1
    last = json.loads(calls[-1]['function']['arguments'])['command']
    assert last.startswith('echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ')
