"""AppDev: small web apps, judged by execution, interaction and visual proxies.

facts/m2-and-forge.md §5; docs/pipelines_appdev.md. A meta-query is a kind of app
(`kinds`), whose seed draws domain, labels, numbers and behaviours. The verifier opens
the agent's app in Chromium, in the verifier's sandbox (`verifier/grade.py`). A task's
source is its kind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

from m2jax.checks import require
from m2jax.sandbox import SandboxUnavailable
from m2jax.tasks import harbor
from m2jax_pipelines import installed, introduction, rubric
from m2jax_pipelines.appdev import app as app_lib
from m2jax_pipelines.appdev import kinds, query
from m2jax_pipelines.candidate import Candidate, PipelineConfig, attempted
from m2jax_pipelines.context import Context
from m2jax_pipelines.llm import SCRIPTED, LLMClient, LLMConfig, Text

_VERIFIER = Path(__file__).parent / 'verifier'
_SITE = 'appdev'
INSTALL = 'apt-get install chromium && pip install -e ./m2jax_pipelines'
PACKAGES = ('playwright', 'greenlet', 'pillow')
_TEST = 'exec python3 -I -S -B "${M2JAX_TESTS:-/tests}/grade.py"\n'
_SOLVE = """\
cd "${M2JAX_WORKSPACE:-/workspace}" && mkdir -p app
cp "${M2JAX_SOLUTION:-/solution}"/app/* app/
"""
# Chromium's processes and threads are about 100.
NEEDS = {'processes': 512, 'memory_bytes': 3 << 29, 'workspace_bytes': 256 << 20}


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """Attributes:
  kinds: kinds of apps; empty: all.
  judge: the model that judges instructions; by default patterns do.
  min_score: instructions whose score by `query.RUBRIC` is below are rejected.
  """

  kind: str = 'appdev'
  dev: tuple[str, ...] = ('timer',)
  held_out: tuple[str, ...] = ('quiz',)
  kinds: tuple[str, ...] = ()
  judge: LLMConfig = LLMConfig()
  min_score: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    unknown = set(self.kinds) - set(kinds.DRAWERS)
    require(
      self, not unknown, 'kinds', f'of {sorted(kinds.DRAWERS)}: {sorted(unknown)}'
    )


async def candidates(config: Config, context: Context) -> AsyncIterator[Candidate]:
  """Yields apps of the kinds in turn, without end."""
  if reason := unavailable():
    raise SandboxUnavailable(reason, INSTALL)
  context.say('packages of the sandboxes')
  installed.site(context.directory('sites'), _SITE, PACKAGES)
  judge = LLMClient(config.judge, 'judge', context.dataset / 'calls.jsonl')
  chosen = config.kinds or tuple(kinds.DRAWERS)
  number = 0
  while True:
    kind = chosen[number % len(chosen)]
    own = f'{kind}/{number}'
    number += 1
    if own in context.done:
      continue
    context.say(kind)
    made = _candidate(config, context.author, judge, kind, own)
    yield await attempted(made, own, 'query', kind, kind)


async def _candidate(
  config: Config, author: LLMClient, judge: LLMClient, kind: str, own: str
) -> Candidate:
  """An app, or why its text cannot be used."""
  started = time.monotonic()
  app = kinds.DRAWERS[kind](random.Random(f'{config.seed}/{own}'))
  statement = await introduction.write(author, app.instruction())
  found = await rubric.judge(judge, query.RUBRIC, statement.text)
  reason = ''
  if missing := query.unnamed(app):
    reason = f'unclear: the instruction does not name {missing}'
  elif found.score < config.min_score:
    failed = [name for name, holds in found.holds.items() if not holds]
    reason = f'judged by {found.by}: not {failed}'
  return Candidate(
    own,
    'query',
    kind,
    kind,
    draft=None if reason else drafted(app, own, statement),
    text='\n'.join([app.title, *app.rules]),
    reason=reason,
    wall_s=time.monotonic() - started,
    facts={
      **{'author': statement.by, 'judge': found.by},
      'criteria': len(app.criteria),
    },
  )


def drafted(app: app_lib.App, own: str, statement: Text | None = None) -> harbor.Draft:
  """The task of an app; `statement` is by default the app's own."""
  statement = statement or Text(app.instruction(), SCRIPTED)
  versions = {name: installed.distribution(name).version for name in PACKAGES}
  verifier = {
    path.name: path.read_bytes()
    for path in _VERIFIER.iterdir()
    if path.suffix in ('.py', '.js')
  }
  solution = {f'app/{name}': data for name, data in app.solution().items()}
  return harbor.Draft(
    name='appdev-' + own.replace('/', '-'),
    instruction=statement.text,
    metadata=harbor.Metadata(
      'appdev',
      app.kind,
      collect=('app/*',),
      site='',
      baseline_calls=4,
      source={
        'name': app.kind,
        'generator': 'm2jax_pipelines',
        'license': 'Apache-2.0',
      },
      verifier_site=_SITE,
      verifier_needs=NEEDS,
      details={
        **{'author': statement.by, 'looks': 'proxies'},
        'mutants': dict(app.mutants),  # flag of the solution → criterion that needs it
      },
    ),
    overlay={f'app/{name}': text.encode() for name, text in app.data.items()},
    tests={
      'test.sh': _TEST.encode(),
      'spec.json': json.dumps(app.spec(), ensure_ascii=False).encode(),
      **verifier,
    },
    solution={'solve.sh': _SOLVE.encode(), **solution},
    image=f'mcr.microsoft.com/playwright/python:v{versions["playwright"]}-noble',
    install=tuple(f'{name}=={version}' for name, version in versions.items()),
    verifier_s=300.0,
  )


def unavailable() -> str:
  """'' if the verifier's browser is on this machine, or what to install."""
  try:
    for name in PACKAGES:
      installed.distribution(name)
  except installed.SourceMissing as error:
    return str(error)
  from m2jax_pipelines.appdev.verifier import browser

  found = any(os.path.exists(path) for path in browser.CHROMIUM)
  return '' if found else f'no Chromium: {INSTALL}'
