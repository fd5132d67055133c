"""Terminal-Gym: tasks at a shell, from real questions, judged by their end state.

docs/facts/m2-and-forge.md (Terminal-Gym); docs/pipelines_terminal.md. Seeds choose the
families; a family draws a workspace, a solution and its end state; statements of
several depths share the tests; scripted solvers say how difficult each is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import time
from collections.abc import AsyncIterator, Sequence

from m2jax.checks import require
from m2jax.tasks import harbor
from m2jax.tasks.harbor import verifier
from m2jax_pipelines import installed
from m2jax_pipelines.candidate import Candidate, PipelineConfig, attempted
from m2jax_pipelines.context import Context
from m2jax_pipelines.terminal_gym import drafts, seeds, solvers, statements
from m2jax_pipelines.terminal_gym.drawn import Degenerate, Drawn, Family
from m2jax_pipelines.terminal_gym.families import FAMILIES


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """Attributes:
  families: names; all of `families.FAMILIES` if empty. A family is a source.
  depths: statements per draw, of depth 0, 1, …; at most 4.
  repairs: attempts to repair a statement, before the scripted one takes its place, and
    a workspace, before a candidate is rejected.
  trials: trials of the noisy solver.
  drop: buckets whose tasks are rejected; by default they are only marked.
  """

  kind: str = 'terminal_gym'
  dev: tuple[str, ...] = ('find_age', 'dates')
  held_out: tuple[str, ...] = ('dedupe', 'links')
  families: tuple[str, ...] = ()
  depths: int = 4
  repairs: int = 3
  trials: int = 4
  drop: tuple[str, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    unknown = set(self.families) - set(FAMILIES)
    require(self, not unknown, 'families', f'of {sorted(FAMILIES)}: {sorted(unknown)}')
    most = len(statements.DEPTHS)
    require(self, 1 <= self.depths <= most, 'depths', f'1 to {most}')
    require(self, self.repairs >= 0, 'repairs', '0 or more')
    require(self, self.trials > 0, 'trials', 'above 0')


async def candidates(config: Config, context: Context) -> AsyncIterator[Candidate]:
  """Yields seeds' documents, then tasks of the families in turn, without end."""
  found: list[seeds.Seed] = []
  for document in seeds.DOCUMENTS:
    context.say(document.name)
    kept, candidate = _seeds(document, context)
    found += kept
    yield candidate
  chosen: dict[Family, list[seeds.Seed]] = {}
  for name in config.families or FAMILIES:
    family = FAMILIES[name]
    chosen[family] = seeds.matching(family, found)
    if not chosen[family]:
      reason = 'no seed matches'
      yield Candidate(f'family/{name}', 'families', name, name, reason=reason)
  chosen = {family: matching for family, matching in chosen.items() if matching}
  number = 0
  while chosen:
    for family, matching in chosen.items():
      context.say(family.name)
      async for candidate in _evolved(config, context, family, matching, number):
        yield candidate
    number += 1


def _seeds(document: seeds.Document, context: Context):
  """(kept seeds, the document's candidate)."""
  started, own = time.monotonic(), f'document/{document.name}'
  about = dict(id=own, stage='seeds', family='seeds', source=document.package)
  try:
    kept, counts = seeds.load(document, context.directory('sources'))
  except installed.SourceMissing as error:
    return [], Candidate(**about, reason=str(error)[:200])
  wall_s = time.monotonic() - started
  return kept, Candidate(**about, passed=True, wall_s=wall_s, facts=counts)


@dataclasses.dataclass(frozen=True)
class _Proved:
  """A draw whose solution passes; `repairs` are the reasons of earlier draws."""

  drawn: Drawn | None
  repairs: tuple[str, ...]
  problem: str = ''
  judged: dict[str, verifier.Verdict] = dataclasses.field(default_factory=dict)


async def _evolved(
  config: Config,
  context: Context,
  family: Family,
  matching: Sequence[seeds.Seed],
  number: int,
) -> AsyncIterator[Candidate]:
  """Candidates of one draw: the direct statement, and its evolved variants."""
  root = f'{family.name}/{number}'
  ids = [root, *(f'{root}+{depth}' for depth in range(1, config.depths))]
  if all(own in context.done for own in ids):
    return
  seed = matching[number % len(matching)]
  started = time.monotonic()
  names = family.name, family.name
  work = prove(config, context, family, seed, root)
  proved = await attempted(work, root, 'author', *names)
  if isinstance(proved, Candidate):
    yield proved
    return
  for depth, own in enumerate(ids):
    if own in context.done and not proved.problem:
      continue
    about = dict(
      id=own,
      stage='evolution' if depth else 'author',
      family=family.name,
      source=family.name,
    )
    if proved.problem:
      yield Candidate(**about, reason=proved.problem, wall_s=time.monotonic() - started)
      return
    work = _candidate(config, context, family, seed, proved, depth, ids)
    made = await attempted(work, **about)
    yield dataclasses.replace(
      made, **about, wall_s=round(time.monotonic() - started, 3)
    )
    started = time.monotonic()


async def prove(
  config: Config, context: Context, family: Family, seed: seeds.Seed, root: str
) -> _Proved:
  """Draws until the solution passes, at most `repairs` times more.

  The procedural author repairs by another draw: what failed is recorded.
  """
  wrong: list[str] = []
  while len(wrong) <= config.repairs:
    own = f'{config.seed}/{root}/{len(wrong)}'
    try:
      drawn = family.draw(random.Random(own))
      if family.hide:
        drawn = family.hide(random.Random(f'{own}/{context.salt()}'), drawn)
      text = statements.scripted(drawn, 0)
      draft = drafts.draft(family, seed, drawn, text, 'proof', {})
      with _staged(context, draft) as directory:
        task = harbor.of_directory(directory)
        verdict = await solvers.attempt(task, drawn.solution(), config.backend)
      if verdict.outcome == verifier.INVALID:
        raise verifier.InvalidVerdict(verdict.reason)
      if verdict.outcome == verifier.PASSED:
        judged = {drawn.solution(): verdict}
        return _Proved(drawn, tuple(wrong), judged=judged)
      wrong.append(f'the solution fails: {verdict.reason}')
    except Degenerate as error:
      wrong.append(f'draw: {error}')
    except harbor.SetupFailed as error:
      wrong.append(f'environment: {error}')
  reason = f'environment: not usable after {config.repairs} repairs: {wrong[-1]}'
  return _Proved(drawn=None, repairs=tuple(wrong), problem=reason)


@contextlib.contextmanager
def _staged(context: Context, draft: harbor.Draft):
  """Writes a draft outside of the dataset's splits, to be tried."""
  draft = dataclasses.replace(draft, name='calibration')
  staging = context.directory(f'tasks/{harbor.STAGING}')
  shutil.rmtree(staging / draft.name, ignore_errors=True)
  path = harbor.write(draft, staging)
  try:
    yield harbor.read(path)
  finally:
    shutil.rmtree(path, ignore_errors=True)


async def _candidate(config, context, family, seed, proved, depth, ids) -> Candidate:
  """The candidate of a statement; its stage and family are set by the caller."""
  own, drawn = ids[depth], proved.drawn
  statement = await statements.write(context.author, drawn, depth, config.repairs)
  facts = {
    'depth': depth,
    'parent': ids[depth - 1] if depth else '',
    'statement': statements.DEPTHS[depth],
    'author': statement.by,
    'repairs': [*proved.repairs, *statement.repairs],
    'seed': seed.id,
  }
  empty = Candidate(own, '', family.name, family.name, facts=facts)
  if statement.problem:
    return dataclasses.replace(empty, reason=statement.problem)
  name = 'terminal-' + own.replace('/', '-').replace('+', '-')
  details = {key: facts[key] for key in ('depth', 'parent', 'statement', 'author')}
  plain = drafts.draft(family, seed, drawn, statement.text, name, details)
  with _staged(context, plain) as directory:
    found = await solvers.calibrate(
      directory,
      drawn,
      trials=config.trials,
      backend=config.backend,
      seed=f'{config.seed}/{ids[0]}',
      judged=proved.judged,
    )
  facts |= found.facts()
  if found.full.outcome != verifier.PASSED:
    return dataclasses.replace(empty, reason=f'the solution fails: {found.full.reason}')
  if found.bucket in config.drop:
    return dataclasses.replace(empty, reason=f'difficulty: {found.bucket}', facts=facts)
  details |= {'repairs': len(facts['repairs']), **found.facts()}
  draft = drafts.draft(family, seed, drawn, statement.text, name, details)
  # An indirect statement omits the values; they are the task's own as well.
  text = ' '.join([statement.text, *drawn.values.values()])
  return dataclasses.replace(empty, draft=draft, text=text, facts=facts)
