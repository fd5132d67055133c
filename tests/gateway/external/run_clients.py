"""`make test-clients`: published agents finish a task, unmodified, for real.

Not collected by default: it installs each program from npm or PyPI into
`$CLIENTS_DIRECTORY` (default .venv/clients). A program that does not install is skipped
with the reason. With RECORD=1 the requests replace those in tests/gateway/recorded,
which test_recorded.py replays.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m2jax.gateway import dialects, hints
from m2jax.rl import rewards
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


def run(serve, tok, tmp_path, monkeypatch, name, answer):
  """Runs a client on the task; returns its output, the engine and the records."""
  client, bin_ = commands.CLIENTS[name], installed(name)
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
  if os.environ.get('RECORD'):
    paths = {str(workspace): '/workspace', str(home): '/home/user', url: 'BASE'}
    paths['episode'] = 'KEY'
    scrubber = recording.Scrubber(paths)
    task = [i for i, r in enumerate(requests) if not recording.untrained(r[1])][-3:]
    kept = [r for i, r in enumerate(requests) if recording.untrained(r[1]) or i in task]
    recording.save(name, version(client, bin_), kept, scrubber)
  return output, engine, records


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
  if client in commands.PYPI.values():
    code = f'import importlib.metadata as m; print(m.version({name!r}))'
    command = [bin_ / 'python', '-c', code]
  done = subprocess.run(command, capture_output=True, text=True)
  return f'{name} {done.stdout.strip()}'


@pytest.mark.parametrize('name', [n for n, c in commands.CLIENTS.items() if c.tool])
def test_task(serve, tok, tmp_path, monkeypatch, name):
  """Every token that would be trained was sampled; each prompt extends the last."""
  answer = script(tok, commands.CLIENTS[name])
  output, engine, records = run(serve, tok, tmp_path, monkeypatch, name, answer)
  assert clients.ANSWER in output
  clients.assert_recorded(engine, records)
  task = rewards.acted(records)
  assert all(r.fork_reason == 'auxiliary' for r in records if r not in task)
  assert len(task) >= 3
  clients.assert_extends(task[-3:])
  # Both calls ran, and their results reached the model.
  shown = tok.decode(task[-1].prompt_ids)
  assert '3 a.txt' in shown and '1\n2\n3' in shown


def terminus_2_script(tok):
  """The same task for Terminus-2, whose commands are JSON in the text."""

  def turn(analysis, *lines, done=False):
    keys = [{'keystrokes': f'{line}\n', 'duration': 0.5} for line in lines]
    content = {'analysis': analysis, 'plan': 'count', 'commands': keys}
    text = json.dumps(content | {'task_complete': done})
    return tok.encode(response_text('I think', text))

  end = turn(clients.ANSWER, done=True)  # which it asks to confirm
  turns = iter([turn('look', 'wc -l a.txt'), turn('all', 'cat a.txt', 'ls'), end, end])
  return lambda request: next(turns)


def test_terminus_2(serve, tok, tmp_path, monkeypatch):
  """Every token that would be trained was sampled. The terminal is a user message,
  after which the template drops earlier thinking: each turn begins a branch."""
  answer = terminus_2_script(tok)
  output, engine, records = run(serve, tok, tmp_path, monkeypatch, 'terminus_2', answer)
  assert clients.ANSWER in output
  clients.assert_recorded(engine, records)
  assert [r.fork_reason for r in records] == [None, *3 * ['thinking_closed']]
  for first, second in itertools.pairwise(records):
    assert second.follows == first.id
  shown = tok.decode(records[-1].prompt_ids)
  assert '3 a.txt' in shown and '1\n2\n3' in shown


def test_sub_agent(serve, tok, tmp_path, monkeypatch):
  """Claude Code's is a branch of the trajectory, which begins where its id does."""
  client = commands.CLIENTS['claude_code']
  asked = {'description': 'count', 'prompt': 'delegated'}

  def answer(request):
    prompt = tok.decode(request.prompt_ids)
    if f'"name": "{client.tool}"' not in prompt:
      return tok.encode(response_text('short', 'a title'))
    begun = '\n<response>' in prompt
    if clients.QUESTION not in prompt:
      called = response_text('mine', '', [client.call('wc -l a.txt')])
      return tok.encode(response_text('mine', 'it has 3') if begun else called)
    delegates = response_text('other', '', [('Agent', asked)])
    return tok.encode(response_text('all', clients.ANSWER) if begun else delegates)

  _, engine, records = run(serve, tok, tmp_path, monkeypatch, 'claude_code', answer)
  clients.assert_recorded(engine, records)
  [first] = [r for r in records if r.fork_reason == 'sub_agent']
  [second] = [r for r in records if r.parent == first.id]
  assert 'delegated' in tok.decode(first.prompt_ids)
  clients.assert_extends([first, second])
  assert {first.id, second.id} < {r.id for r in rewards.acted(records)}
