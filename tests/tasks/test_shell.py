"""The tool `sh`: its arguments, its observations, and that it runs in the sandbox."""

import asyncio

import pytest

from m2jax import sandbox
from m2jax.sandbox import ExecResult
from m2jax.tasks import BadCall, terminal
from m2jax.tasks.terminal import shell
from tests.tasks.local_shell import SANDBOX


@pytest.mark.parametrize(
  'result, text',
  [
    (ExecResult(0, 'a\nb\n', ''), 'a\nb'),
    (ExecResult(0, '', ''), ''),
    (ExecResult(1, '', ''), 'exit 1'),
    (ExecResult(1, '', 'no\n'), 'no'),
    (ExecResult(2, 'out\n', 'err\n'), 'out\nerr'),
    (ExecResult(2, 'out', 'err\n'), 'out\nerr'),
    (
      ExecResult(124, 'part', '', timed_out=True, wall_s=2.04),
      'part\nkilled: out of time',
    ),
    (ExecResult(124, '', '', timed_out=True), 'killed: out of time'),
    (ExecResult(137, '', '', oom=True), 'killed: out of memory'),
    (
      ExecResult(137, 'x' * 10_000, '', truncated=True),
      'x' * 160 + '\n[9840 more characters]',
    ),
  ],
)
def test_observation(result, text):
  """Output, errors and silent failures each reach the agent, within a bound."""
  assert shell.observation(result) == text


@pytest.mark.parametrize(
  'name, arguments, said',
  [
    ('rm', {'cmd': 'a'}, "no tool 'rm'; use sh"),
    ('sh', {}, 'sh takes one string: cmd'),
    ('sh', {'cmd': 1}, 'sh takes one string: cmd'),
    ('sh', {'cmd': 'a', 'b': 'c'}, 'sh takes one string: cmd'),
    ('sh', {'command': 'a'}, 'sh takes one string: cmd'),
  ],
)
def test_bad_call(name, arguments, said):
  """The observation names what is wrong with the call."""
  with pytest.raises(BadCall, match=said):
    shell.command_of(name, arguments)


def test_workspace_runs_calls_in_the_sandbox():
  """The task's files exist, the host sees what a call writes, and a bad call runs no
  shell."""
  task = terminal.make(terminal.spec('train', 0, family='steps_1'))

  async def run():
    async with task.open(**SANDBOX) as environment:
      execute, directory = environment.execute, environment.workspace
      name = min(task.files)
      shown = await execute('sh', {'cmd': f'wc -c < {name}; id -u; echo hi > new'})
      with pytest.raises(BadCall):
        await execute('sh', {'command': 'echo no > new'})
      size, uid = map(int, shown.split())
      assert size == len(task.files[name]) and uid != 0
      assert (directory / 'new').read_text() == 'hi\n'
    await sandbox.shutdown()

  asyncio.run(run())
