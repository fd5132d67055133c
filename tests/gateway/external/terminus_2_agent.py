"""Harbor's Terminus-2 in the current directory: its class, unmodified, on this machine.

Terminus-2 is no command: it drives tmux through an environment of Harbor, which are
containers. `Here` has what it uses of one: commands run where this program runs.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Here:
  """The environment: `exec` in the current directory."""

  session_id = 'here'
  default_user = None

  async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
    process = await asyncio.create_subprocess_exec(
      'bash', '-c', command, cwd=cwd, env={**os.environ, **(env or {})},
      stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
    return ExecResult(
      stdout=out.decode(), stderr=err.decode(), return_code=process.returncode
    )


async def main(task: str) -> None:
  logs = Path(tempfile.mkdtemp())
  agent = Terminus2(
    logs_dir=logs,
    model_name='openai/m2jax',
    api_base=os.environ['OPENAI_BASE_URL'],
    model_info={'max_input_tokens': 196608, 'max_output_tokens': 4096},
    interleaved_thinking=True,
    record_terminal_session=False,  # needs asciinema
    max_turns=10,
  )
  try:
    await agent.setup(Here())
    await agent.run(task, Here(), AgentContext())
  finally:
    with contextlib.suppress(TimeoutError):  # the server in $TMUX_TMPDIR
      await Here().exec('tmux kill-server', timeout_sec=10)
  steps = json.loads((logs / 'trajectory.json').read_text())['steps']
  print(next(step['message'] for step in reversed(steps) if step['source'] == 'agent'))


asyncio.run(main(sys.argv[1]))
