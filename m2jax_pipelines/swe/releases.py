"""Stages 1, 3 and 4 for real changes: consecutive releases of a package.

The newer release's tests on the older release's sources show what changed (facts
§3.3). Tags and routing: a test that fails there and existed is F2P of a *bug*; tests
that only the newer one has, or that cannot be imported before, are the new test points
of a *feature*; a change of tests alone is *test*, and one that no test distinguishes
from the older sources is *performance* if some take significantly less time, else
*refactor*. Changes of tests and refactorings have no verifier and are rejected.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from m2jax.tasks.harbor import compose
from m2jax_pipelines.candidate import Candidate, attempted
from m2jax_pipelines.context import Context
from m2jax_pipelines.swe import collect, drafts, environment, statements, timing
from m2jax_pipelines.swe.config import Config
from m2jax_pipelines.swe.environment import Environment

_NOTES = re.compile(r'(CHANGE|HISTORY|NEWS|RELEASE)[^/]*$', re.IGNORECASE)


def older(versions: list[str], version: str, count: int) -> list[str]:
  """The `count` releases before a version; `versions` are newest first."""
  if version not in versions:
    return []
  at = versions.index(version)
  return versions[at + 1 : at + 1 + count]


async def candidates(
  env: Environment, config: Config, context: Context
) -> AsyncIterator[Candidate]:
  """A candidate per older release: consecutive ones, and skipped ones merge commits."""
  name, version = env.source.name, env.source.version
  try:
    listed = await collect.versions(name)
  except collect.CollectError as error:
    yield _missing(env, 'all', str(error))
    return
  for number, before in enumerate(older(listed, version, config.releases)):
    id_ = f'{name}-{before}..{version}'
    if id_ in context.done:
      continue
    try:
      place = context.directory('sources')
      source = await collect.fetch(f'{name}=={before}', place)
      work = candidate(env, source, context, id_, merged=number > 0)
      yield await attempted(work, id_, 'releases', 'release', name)
    except collect.CollectError as error:
      yield _missing(env, before, str(error))


def _missing(env: Environment, before: str, reason: str) -> Candidate:
  """The registry does not answer, or has none: the next run asks again."""
  return Candidate(
    id=f'{env.source.name}-{before}..{env.source.version}',
    stage='releases',
    family='release',
    source=env.source.name,
    reason=reason,
    invalid=True,
  )


def sources(env: Environment, files: dict[str, bytes]) -> dict[str, bytes]:
  """The files of a release that are the package's own code."""
  policy = env.code, environment.EXCLUDE
  return {p: d for p, d in files.items() if compose.is_work(p, *policy)}


async def candidate(
  env: Environment, old: collect.Source, context: Context, id_: str, *, merged: bool
) -> Candidate:
  """The candidate of a pair of releases, with its tag as family."""
  code, before = sources(env, env.source.files), sources(env, old.files)
  changed = {p: d for p, d in before.items() if code.get(p) != d}
  gone = sorted(set(code) - set(before))

  def rejected(tag: str, reason: str) -> Candidate:
    return Candidate(id_, 'releases', tag, env.source.name, reason=reason)

  if not changed and not gone:
    return rejected('test', 'test: no source changed')
  tree = {p: d for p, d in env.source.files.items() if p not in code} | before
  status = await environment.statuses(env, context.dataset, tree)
  f2p = [t for t, s in env.status.items() if status.get(t) != s]
  p2p = [t for t in env.status if t not in set(f2p)]
  if not f2p:
    texts = {p: d.decode(errors='replace') for p, d in changed.items()}
    found = None if gone else await _performance(env, context, tree, texts, id_)
    reason = 'refactor: no test distinguishes the releases, by result or time'
    return found or rejected('refactor', reason)
  if not p2p:
    return rejected('feature', 'no test passes on both releases')
  fails = any(status.get(t) in ('FAILED', 'ERROR') for t in f2p)
  feature = not fails or any(t not in status for t in f2p)
  tag = 'feature' if feature else 'bug'
  notes = _notes(old.files, env.source.files)
  diff = drafts.patch(changed, {p: code[p] for p in {*changed, *gone} if p in code})
  shown = statements.excerpt(env, sorted(f2p)[0])
  written = await context.author.write(
    statements.request(env, diff[:8000], shown),
    lambda: statements.release(env, old.version, notes, feature),
    lambda said: statements.acceptable(said, env, diff, shown),
  )
  text = written.text
  if shown and not notes:  # enriched: a statement without any particulars is none
    text += f'\nAn example that must work:\n\n```python\n{shown}\n```\n'
  draft = drafts.repair(
    env, f'{env.source.name}-{old.version}-{env.source.version}', tag, text, changed,
    f2p, p2p, gone=gone,
    details={'author': written.by, 'before': old.provenance, 'merged': merged},
  )  # fmt: skip
  stage = 'release merging' if merged else 'releases'
  facts = {'f2p': len(f2p), 'p2p': len(p2p), 'diff_lines': diff.count('\n')}
  return Candidate(
    id_, stage, tag, env.source.name, draft, f'release {id_} {diff[:4000]}', facts=facts
  )


async def _performance(
  env: Environment, context: Context, tree, slow: dict[str, str], id_: str
) -> Candidate | None:
  """A task to make tests faster, if the newer release makes them so significantly."""
  timed, _ = await timing.significant(env, context, tree, list(env.status))
  if not timed:
    return None
  draft = drafts.performance(
    env, f'{id_}-performance', slow, timed, timing.PAIRS, timing.LEAST
  )
  facts = {'timed': len(timed)}
  return Candidate(
    id_, 'releases', 'performance', env.source.name, draft, id_, facts=facts
  )


def _notes(old: dict[str, bytes], new: dict[str, bytes]) -> str:
  for path in sorted(new, key=lambda p: (p.count('/'), p)):
    if _NOTES.search(path):
      found = statements.notes(old.get(path, b''), new[path])
      if found:
        return found
  return ''
