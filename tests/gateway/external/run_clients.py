"""`make test-clients`: published coding agents finish a task, unmodified, for real.

Not collected by default: it installs each program from npm or PyPI into
`$CLIENTS_DIRECTORY` (default .venv/clients). A program that does not install is skipped
with the reason. With RECORD=1 the requests replace those in tests/gateway/recorded,
which test_recorded.py replays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m2jax.gateway import dialects
from tests.gateway import clients
from tests.gateway.conftest import response_text
from tests.gateway.external import commands, recording

_DIRECTORY = Path(os.environ.get('CLIENTS_DIRECTORY', '.venv/clients')).absolute()
# Prompts of these programs have tens of thousands of tokens.
_LARGE = {'body_overhead_bytes': 8 << 20, 'inline_bytes': 1 << 20}


def script(tok, client: commands.Client):
  """The task's model: one call, two parallel calls, the answer."""
  one, two = client.call('wc -l a.txt'), client.call('cat a.txt')
  turns = {
    0: response_text('I should look', 'Ok', [one]),
    1: response_text('both', '', [two, one]),
    3: response_text('I think', clients.ANSWER),
  }

  def answer(request):
    prompt = tok.decode(request.prompt_ids)
    if f'"name": "{client.tool}"' not in prompt:  # a title, a summary
      return tok.encode(response_text('short', 'a title'))
    return tok.encode(turns[prompt.count('\n<response>')])

  return answer


def installed(name: str) -> Path:
  """The directory of a client's programs."""
  client = commands.CLIENTS[name]
  packages = client.package.split()
  _DIRECTORY.mkdir(parents=True, exist_ok=True)
  if name in commands.NPM:
    bin_ = _DIRECTORY / 'node_modules' / '.bin'
    steps = [('npm', 'install', '--no-audit', '--no-fund', '--prefix', _DIRECTORY)]
    done = bin_ / client.command[0]
  else:  # an environment of its own, with a marker of the complete installation
    bin_, done = _DIRECTORY / name / 'bin', _DIRECTORY / name / 'installed'
    python = shutil.which('python3.13') or shutil.which('python3.12') or sys.executable
    steps = [(python, '-m', 'venv', _DIRECTORY / name)]
    steps.append((bin_ / 'pip', 'install', '--quiet', '--disable-pip-version-check'))
  if done.exists():
    return bin_
  steps[-1] = (*steps[-1], *packages)
  try:
    for step in steps:
      subprocess.run(step, capture_output=True, text=True, timeout=900, check=True)
  except (OSError, subprocess.SubprocessError) as error:
    why = getattr(error, 'stderr', None) or error
    pytest.skip(f'{client.package} does not install: {str(why)[-500:]}')
  if name in commands.PYPI:
    done.touch()
  return bin_


@pytest.mark.parametrize('name', commands.NOT_RUN)
def test_not_run(name):
  pytest.skip(f'{name}: {commands.NOT_RUN[name]}')


@pytest.mark.parametrize('name', commands.CLIENTS)
def test_task(serve, tok, tmp_path, monkeypatch, name):
  """Every token that would be trained was sampled; each prompt extends the last."""
  client, bodies = commands.CLIENTS[name], []
  bin_ = installed(name)
  parse = dialects.parse

  def parse_and_keep(body, dialect):
    if dialect == client.dialect:
      bodies.append(json.loads(bytes(body)))
    return parse(body, dialect)

  monkeypatch.setattr(dialects, 'parse', parse_and_keep)
  options = {'context_tokens': 400_000}
  gateway, engine, records = serve(
    script(tok, client), engine_options=options, **_LARGE
  )
  gateway.sessions.open('episode', 'training')
  workspace, home = tmp_path / 'workspace', tmp_path / 'home'
  workspace.mkdir()
  home.mkdir()
  (workspace / 'a.txt').write_text('1\n2\n3\n')
  url = gateway.base_url.removesuffix('/v1')
  output = commands.run(client, bin_, workspace, home, url, 'episode')
  assert clients.ANSWER in output
  clients.assert_recorded(engine, records)
  assert len(records) >= 3
  clients.assert_extends(records[-3:])
  # Both calls ran, and their results reached the model.
  shown = tok.decode(records[-1].prompt_ids)
  assert '3 a.txt' in shown and '1\n2\n3' in shown
  if os.environ.get('RECORD'):
    version = subprocess.run(
      [bin_ / client.command[0], '--version'], capture_output=True, text=True
    ).stdout.strip()
    paths = {str(workspace): '/workspace', str(home): '/home/user', url: 'BASE'}
    paths['episode'] = 'KEY'
    scrubber = recording.Scrubber(paths)
    recording.save(name, f'{client.package} {version}', bodies[-3:], scrubber)
