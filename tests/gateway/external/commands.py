"""Coding agents that are programs of their own: how each is installed and started.

`$url` is the gateway without `/v1`, `$key` the session, `$home` an empty directory.
docs/agents.md shows the same settings.
"""

from __future__ import annotations

import dataclasses
import json
import os
import string
import subprocess
from collections.abc import Mapping
from pathlib import Path

QUESTION = 'count the lines of a.txt'
_CODEX = """\
model = "m2jax"
model_provider = "m2jax"
model_context_window = 196608
[model_providers.m2jax]
name = "m2jax"
base_url = "$url/v1"
env_key = "M2JAX_KEY"
wire_api = "responses"
"""
_OPENCODE = {
  'model': 'm2jax/m2jax',
  'small_model': 'm2jax/small',
  'autoupdate': False,
  'share': 'disabled',
  'provider': {
    'm2jax': {
      'npm': '@ai-sdk/openai-compatible',
      'options': {'baseURL': '$url/v1', 'apiKey': '$key'},
      'models': {
        'm2jax': {
          'tool_call': True,
          'reasoning': True,
          'limit': {'context': 196608, 'output': 4096},
        },
        'small': {  # writes titles
          'id': 'm2jax',
          'headers': {'x-m2jax-request-class': 'auxiliary'},
          'limit': {'context': 196608, 'output': 4096},
        },
      },
    }
  },
}


@dataclasses.dataclass(frozen=True)
class Client:
  """A program with one task.

  Attributes:
    package: of npm, or several of PyPI with spaces between them.
    command: what is run in the workspace; the first word is a program of the package.
    dialect: that it speaks.
    tool, argument: its tool for shell commands, and the argument with the command;
      '' if it has no tools and reads its commands from the text.
    others: further required arguments.
    environment: additional variables.
    files: path → text, written before the start.
  """

  package: str
  command: tuple[str, ...]
  dialect: str
  tool: str = ''
  argument: str = ''
  others: Mapping[str, str] = dataclasses.field(default_factory=dict)
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def call(self, line: str) -> tuple[str, dict]:
    """Name and arguments of a call that runs a line."""
    return self.tool, {self.argument: line, **self.others}


NPM = {
  'claude_code': Client(
    package='@anthropic-ai/claude-code',
    command=('claude', '-p', QUESTION, '--allowedTools', 'Bash'),
    dialect='anthropic',
    tool='Bash',
    argument='command',
    others={'description': 'count'},
    environment={
      'ANTHROPIC_BASE_URL': '$url',
      'ANTHROPIC_API_KEY': '$key',
      'ANTHROPIC_MODEL': 'm2jax',
      'ANTHROPIC_DEFAULT_HAIKU_MODEL': 'm2jax',
      'CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC': '1',
      'CLAUDE_CODE_GATEWAY_HINT_HEADERS': '1',
      'CLAUDE_CODE_MAX_CONTEXT_TOKENS': '196608',
    },
  ),
  'codex': Client(
    package='@openai/codex',
    command=(
      *('codex', 'exec', '--skip-git-repo-check'),
      *('--dangerously-bypass-approvals-and-sandbox', QUESTION),
    ),
    dialect='responses',
    tool='exec_command',
    argument='cmd',
    environment={'M2JAX_KEY': '$key'},
    files={'$home/.codex/config.toml': _CODEX},
  ),
  'opencode': Client(
    package='opencode-ai',
    command=('opencode', 'run', QUESTION),
    dialect='openai_chat',
    tool='bash',
    argument='command',
    others={'description': 'count'},
    files={'$home/.config/opencode/opencode.json': json.dumps(_OPENCODE)},
  ),
}


_LITELLM = {
  'OPENAI_BASE_URL': '$url/v1',
  'OPENAI_API_KEY': '$key',
  'LITELLM_LOCAL_MODEL_COST_MAP': 'True',
}
_HERE = Path(__file__).parent
# Python 3.12 or later.
PYPI = {
  'openhands': Client(
    package='openhands-sdk openhands-tools',
    command=('python', str(_HERE / 'openhands_agent.py'), QUESTION),
    dialect='openai_chat',
    tool='terminal',
    argument='command',
    environment=_LITELLM,
  ),
  'terminus_2': Client(
    package='harbor',
    command=('python', str(_HERE / 'terminus_2_agent.py'), QUESTION),
    dialect='openai_chat',
    environment={**_LITELLM, 'TMUX_TMPDIR': '$home'},
  ),
}
CLIENTS = NPM | PYPI


def compacting(client: Client) -> Client:
  """The client with a context that one long result fills (`scripts.compaction`).

  Claude Code compacts at a part of its context, Codex at a number of tokens: both are
  between the lengths of the prompts without and with the result.
  """
  if client is CLIENTS['codex']:
    limit = 'model_auto_compact_token_limit = 42000\n'
    return dataclasses.replace(
      client, files={path: limit + text for path, text in client.files.items()}
    )
  percent = {'CLAUDE_AUTOCOMPACT_PCT_OVERRIDE': '35'}
  return dataclasses.replace(client, environment={**client.environment, **percent})


def run(
  client: Client, bin_: Path, workspace: Path, home: Path, url: str, key: str
) -> str:
  """Runs a client to its end; returns what it printed.

  Raises:
    RuntimeError: it failed; with its output.
  """
  fill = lambda text: string.Template(text).safe_substitute(url=url, key=key, home=home)
  for path, text in client.files.items():
    file = Path(fill(path))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(fill(text))
  environment = {name: fill(value) for name, value in client.environment.items()}
  path = f'{bin_}{os.pathsep}{os.environ["PATH"]}'
  done = subprocess.run(
    [bin_ / client.command[0], *client.command[1:]],
    cwd=workspace,
    env={'PATH': path, 'HOME': str(home), 'TMPDIR': str(home), **environment},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=300,
  )
  if done.returncode:
    output = f'{done.stdout}\n{done.stderr}'
    raise RuntimeError(f'{client.command[0]} exited with {done.returncode}:\n{output}')
  return done.stdout
