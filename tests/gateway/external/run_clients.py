"""`make test-clients`: published agents finish a task, unmodified, for real.

Not collected by default: it installs the newest version of each program from npm or
PyPI into `$CLIENTS_DIRECTORY` (default .venv/clients), once: remove the directory for
newer ones. A program that does not install is skipped with the reason. With RECORD=1
the requests replace those in tests/gateway/recorded, which test_recorded.py replays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m2jax.gateway import dialects, hints
from tests.gateway import clients
from tests.gateway.external import commands, recording, scripts

_DIRECTORY = Path(os.environ.get('CLIENTS_DIRECTORY', '.venv/clients')).absolute()
# Prompts of these programs have tens of thousands of tokens.
_LARGE = {'body_overhead_bytes': 8 << 20, 'inline_bytes': 1 << 20}


def _python() -> str:
  """A Python of at least 3.12, which these packages need; else this one."""
  if sys.version_info >= (3, 12):
    return sys.executable
  for name in ('python3.13', 'python3.12'):
    found = shutil.which(name)  # may be a shim of a version manager that does not run
    if found and not subprocess.run([found, '-c', ''], capture_output=True).returncode:
      return found
  return sys.executable


def installed(name: str) -> Path:
  """The directory of a client's programs."""
  client = commands.CLIENTS[name]
  packages = client.package.split()
  if name in commands.NPM:  # without the tag npm takes one for the node that it runs on
    packages = [f'{package}@latest' for package in packages]
  _DIRECTORY.mkdir(parents=True, exist_ok=True)
  if name in commands.NPM:
    bin_ = _DIRECTORY / 'node_modules' / '.bin'
    steps = [('npm', 'install', '--no-audit', '--no-fund', '--prefix', _DIRECTORY)]
    done = bin_ / client.command[0]
  else:  # an environment of its own, with a marker of the complete installation
    bin_, done = _DIRECTORY / name / 'bin', _DIRECTORY / name / 'installed'
    steps = [(_python(), '-m', 'venv', _DIRECTORY / name)]
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


def run(serve, tok, tmp_path, monkeypatch, name):
  """Runs a scenario; returns the client's output, the engine, the records, and a
  function that saves the requests."""
  scenario = scripts.SCENARIOS[name]
  client, bin_ = scenario.command(), installed(scenario.client)
  answer = scenario.script(tok, client)
  requests = keep_requests(monkeypatch, client.dialect)
  options = {'context_tokens': 400_000}
  gateway, engine, records = serve(answer, engine_options=options, **_LARGE)
  gateway.sessions.open('episode', 'training')
  workspace, home = tmp_path / 'workspace', tmp_path / 'home'
  workspace.mkdir()
  home.mkdir()
  (workspace / 'a.txt').write_text('1\n2\n3\n')
  url = gateway.base_url.removesuffix('/v1')
  output = commands.run(client, bin_, workspace, home, url, 'episode')
  paths = {str(workspace): '/workspace', str(home): '/home/user', url: 'BASE'}
  paths['episode'] = 'KEY'

  def save():
    scrubber = recording.Scrubber(paths, scripts.MARKERS, scenario.tools)
    recording.save(name, version(client, bin_), requests, scrubber)

  return output, engine, records, save


def keep_requests(monkeypatch, dialect: str) -> list[tuple[dict, dict[str, str]]]:
  """The list to which each request of a dialect is added: its body and headers."""
  requests, parse, headers = [], dialects.parse, hints.headers

  def parse_and_keep(body, name):
    if name == dialect:
      requests.append((json.loads(bytes(body)), {}))
    return parse(body, name)

  def headers_and_keep(scope):  # follows the parsing without a pause
    requests[-1][1].update(found := headers(scope))
    return found

  monkeypatch.setattr(dialects, 'parse', parse_and_keep)
  monkeypatch.setattr(hints, 'headers', headers_and_keep)
  return requests


def version(client: commands.Client, bin_: Path) -> str:
  """The package, or the first of them, with its version."""
  name = client.package.split()[0]
  command = [bin_ / client.command[0], '--version']
  if client.command[0] == 'python':
    code = f'import importlib.metadata as m; print(m.version({name!r}))'
    command = [bin_ / 'python', '-c', code]
  done = subprocess.run(command, capture_output=True, text=True)
  return f'{name} {done.stdout.strip()}'


@pytest.mark.parametrize('name', scripts.SCENARIOS)
def test_scenario(serve, tok, tmp_path, monkeypatch, name):
  """The task ends with its answer; every token that would be trained was sampled."""
  scenario = scripts.SCENARIOS[name]
  output, engine, records, save = run(serve, tok, tmp_path, monkeypatch, name)
  assert clients.ANSWER in output
  clients.assert_recorded(engine, records)
  scenario.check(records)
  prompts = [tok.decode(record.prompt_ids) for record in records]
  for text in scenario.shown:
    assert any(text in prompt for prompt in prompts)
  if os.environ.get('RECORD'):
    save()
