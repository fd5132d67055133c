"""Stages 3 to 6 for injected bugs: screen, reward, statement, and what is made of them.

Mutants are screened in batches: one sandbox command, in which a process that has pytest
imported forks for each mutant and runs only the tests that call the changed function
(`Environment.calls`, recorded once a package). Admission then proves each task with the
task's own verifier.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from m2jax.tasks.harbor import compose
from m2jax_pipelines.candidate import Candidate, attempted
from m2jax_pipelines.context import Context
from m2jax_pipelines.swe import drafts, environment, mutate, statements, third
from m2jax_pipelines.swe.config import Config
from m2jax_pipelines.swe.environment import Environment
from m2jax_pipelines.swe.mutate import Mutation

_IMPORT = '<import>'


@dataclasses.dataclass(frozen=True)
class Bug:
  """A mutation with executed proof: the tests that it breaks, and those it leaves."""

  mutation: Mutation
  text: str
  f2p: tuple[str, ...]
  p2p: tuple[str, ...]


def sites(
  env: Environment, seed: int, edits: Callable[..., list[Mutation]] = mutate.mutations
) -> list[tuple[Mutation, list[str]]]:
  """Mutations of functions that tests call, with those tests.

  Rotates over functions, so that even a few tasks cover many functions.
  """
  by_function: dict[tuple, list[tuple[Mutation, list[str]]]] = {}
  rng = random.Random(f'{env.source.name}/{env.source.version}/{seed}')
  for path in sorted(env.source.files):
    if not compose.is_work(path, env.code, environment.EXCLUDE):
      continue
    called = env.calls.get(path, {})
    text = env.source.files[path].decode(errors='replace')
    for mutation in edits(path, text, rng):
      callers = called.get(mutation.line, [])
      tests = env.status if _IMPORT in callers else callers
      tests = [t for t in tests if t in env.status]
      if tests:
        key = path, mutation.function
        by_function.setdefault(key, []).append((mutation, tests))
  groups = list(by_function.values())
  rng.shuffle(groups)
  turns = itertools.zip_longest(*groups)
  return [site for turn in turns for site in turn if site is not None]


def identity(env: Environment, mutation: Mutation) -> str:
  """Id of a mutation, the same in every run."""
  source = f'{env.source.name}-{env.source.version}'
  return f'{source}/{mutation.path}/{mutation.start}-{mutation.end}/{mutation.new}'


async def screened(
  env: Environment, chosen: Sequence[tuple[Mutation, list[str]]], context: Context
) -> AsyncIterator[tuple[Mutation, str, list[str], dict[str, Any] | None]]:
  """Runs the affected tests of mutants.

  Yields:
    The mutation, the file's new text, its tests, and what they did; or why it was not
    run, no tests, and None.
  """
  mutants = []
  for mutation, tests in chosen:
    text = mutation.apply(env.source.files[mutation.path].decode(errors='replace'))
    if not mutate.parses(text):
      yield mutation, 'not Python', [], None
      continue
    files = sorted({drafts.test_file(t) for t in tests})
    took = [env.seconds[t] for t in tests]
    limit_s, quiet_s = (3 + 4 * (env.import_s + s) for s in (sum(took), max(took)))
    limits = {'limit_s': limit_s, 'quiet_s': quiet_s}
    mutants.append((mutation, text, tests, files, limits))
  output = await environment.run(
    context.dataset,
    env.site,
    env.source.files,
    'screen',
    roots=env.roots,
    mutants=[
      {'path': m.path, 'text': text, 'files': files, 'keep': tests, **limits}
      for m, text, tests, files, limits in mutants
    ],
  )
  for number, (mutation, text, tests, _, _) in enumerate(mutants):
    found = output.mutants.get(number)
    if found is None or (found['end'] is None and not found['timeout']):
      yield mutation, 'the tests did not run', [], None
    else:
      yield mutation, text, tests, found


async def screen(
  env: Environment, chosen: Sequence[tuple[Mutation, list[str]]], context: Context,
  config: Config,
) -> AsyncIterator[tuple[Mutation, Bug | str]]:  # fmt: skip
  """Yields the proved bug of each mutation, or why there is none.

  Those that break a test run all of them then: a test that calls no changed function
  may need it through a cache or another process.
  """
  broken = []
  async for mutation, text, tests, found in screened(env, chosen, context):
    proved = _judged(env, mutation, text, tests, found, config)
    if isinstance(proved, str) or len(tests) == len(env.status):
      yield mutation, proved
    else:
      broken.append((mutation, list(env.status)))
  if broken:
    async for mutation, *ran in screened(env, broken, context):
      yield mutation, _judged(env, mutation, *ran, config)


def _judged(env, mutation, text, tests, found, config: Config) -> Bug | str:
  if found is None:
    return text
  if found['timeout']:
    return 'the tests do not end'
  ran = found['tests']
  f2p = [t for t in tests if ran.get(t) != env.status[t]]
  if not f2p:
    return 'survived: no test fails'
  p2p = [t for t in env.status if t not in set(f2p)]
  if not p2p or len(f2p) > config.largest_f2p * len(env.status):
    return 'too obvious: most tests fail'
  if all(t not in ran for t in f2p):
    return 'the package cannot be imported'
  return Bug(mutation, text, tuple(f2p), tuple(p2p))


async def candidates(
  env: Environment, config: Config, context: Context
) -> AsyncIterator[Candidate]:
  """Tasks from injected bugs of one package, until the caller stops.

  Every n-th bug is also merged, inverted or reviewed; bugs of the runs that this one
  continues count, so that a run that was stopped has the same mixture.
  """
  bugs: list[Bug] = []
  before = sum(
    row['source'] == env.source.name and row['family'] == 'bug' and 'admission_s' in row
    for row in context.rows
  )
  left = [s for s in sites(env, config.seed) if identity(env, s[0]) not in context.done]
  for at in range(0, len(left), config.batch):
    batch = left[at : at + config.batch]
    seconds = 0.0
    async for mutation, found in screen(env, batch, context, config):
      if isinstance(found, str):
        yield _rejected(env, mutation, found, seconds)
        continue
      bugs.append(found)
      for candidate in await _made(env, config, context, bugs, before):
        yield candidate


def _rejected(env, mutation: Mutation, reason: str, wall_s: float) -> Candidate:
  return Candidate(
    id=identity(env, mutation),
    stage='bug injection',
    family='bug',
    source=env.source.name,
    reason=reason,
    wall_s=wall_s,
    facts={'kind': mutation.kind},
  )


async def _made(env, config: Config, context: Context, bugs: list[Bug], before: int):
  """Candidates of the newest bug, which has `before` other runs' bugs before it."""
  number, newest = before + len(bugs), bugs[-1]
  rng = random.Random(identity(env, newest.mutation))
  made = []
  if 'bug' in config.families:
    made.append(await _repair(env, context, [newest], rng))
  if 'merged' in config.families and number % config.merge == 0:
    other = _partner(newest, bugs[:-1])
    if other is not None:
      made.append(await _repair(env, context, [other, newest], rng))
  if 'test' in config.families and number % config.invert == 0:
    made.append(_write_test(env, newest))
  if 'review' in config.families and number % config.review_ == 0:
    made.append(_review(env, newest, rng))
  return made


def _partner(newest: Bug, others: Sequence[Bug]) -> Bug | None:
  """Another bug of the same file whose edit and tests are apart."""
  m = newest.mutation
  for other in reversed(others):
    o = other.mutation
    if o.path == m.path and o.function != m.function:
      apart = o.end <= m.start or m.end <= o.start
      if apart and not set(other.f2p) & set(newest.f2p):
        return other
  return None


async def _repair(env, context, bugs: Sequence[Bug], rng) -> Candidate:
  family = 'bug' if len(bugs) == 1 else 'merged'
  stage = 'bug injection' if len(bugs) == 1 else 'commit merging'
  id_ = '+'.join(identity(env, bug.mutation) for bug in bugs)
  about = id_, stage, family, env.source.name
  return await attempted(_repaired(env, context, bugs, rng, about), *about)


async def _repaired(env, context, bugs: Sequence[Bug], rng, about) -> Candidate:
  id_, stage, family, source = about
  mutations = [bug.mutation for bug in bugs]
  path = mutations[0].path
  text = original = env.source.files[path].decode()
  for mutation in sorted(mutations, key=lambda m: -m.start):
    text = mutation.apply(text)
  f2p = sorted({t for bug in bugs for t in bug.f2p})
  p2p = sorted(set.intersection(*(set(bug.p2p) for bug in bugs)))
  diff = drafts.patch({path: text.encode()}, {path: original.encode()})
  shown = statements.excerpt(env, f2p[0])
  written = await context.author.write(
    statements.request(env, diff, shown),
    lambda: statements.bug(env, mutations, f2p, rng),
    lambda said: statements.acceptable(said, env, diff, shown),
  )
  draft = drafts.repair(
    env, name(env, family, id_), family, written.text, {path: text.encode()}, f2p, p2p,
    details={'author': written.by, 'kinds': [m.kind for m in mutations]},
  )  # fmt: skip
  return Candidate(
    id=id_,
    stage=stage,
    family=family,
    source=source,
    draft=draft,
    text=marked(family, mutations, diff),
    facts={
      'f2p': len(f2p),
      'p2p': len(p2p),
      'kind': '+'.join(m.kind for m in mutations),
    },
  )


def _write_test(env, bug: Bug) -> Candidate:
  m = bug.mutation
  id_ = f'test/{identity(env, m)}'
  original = env.source.files[m.path]
  other = third.source(original.decode(), bug.text, m.function, m.line)
  if not other:
    reason = f'no third variant of {m.function}'
    return Candidate(id_, 'SWE-Test inversion', 'test', env.source.name, reason=reason)
  target = drafts.regression_test(sorted(map(drafts.test_file, bug.f2p))[0])
  draft = drafts.write_test(
    env,
    name(env, 'test', id_),
    statements.write_test(env, m, target),
    m.path,
    bug.text,
    other,
    bug.f2p,
  )
  diff = drafts.patch({m.path: original}, {m.path: bug.text.encode()})
  return Candidate(
    id_,
    'SWE-Test inversion',
    'test',
    env.source.name,
    draft,
    marked('test', [m], diff),
  )


def _review(env, bug: Bug, rng: random.Random) -> Candidate:
  """The bug among harmless changes: comments at the starts of other functions."""
  m = bug.mutation
  text, line = commented(bug.text, m.at, rng)
  last = line + m.new.count('\n')
  id_ = f'review/{identity(env, m)}'
  draft = drafts.review(
    env,
    name(env, 'review', id_),
    statements.review(env),
    {m.path: text.encode()},
    m.path,
    range(line, last + 1),
  )
  original = env.source.files[m.path]
  diff = drafts.patch({m.path: original}, {m.path: text.encode()})
  return Candidate(
    id_, 'code review', 'review', env.source.name, draft, marked('review', [m], diff)
  )


_COMMENTS = (
  'The order matters here.',
  'See the documentation.',
  'Callers rely on this.',
  'Kept for compatibility.',
)


def commented(text: str, line: int, rng: random.Random) -> tuple[str, int]:
  """A file with comments at the starts of functions, and where a line of it is then.

  Args:
    text: the file's text.
    line: a line that gets no comment near it.
    rng: chooses functions and comments.
  """
  starts = {
    node.body[0].lineno
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno
  }
  others = sorted(at for at in starts if abs(at - line) > 8)
  rows = text.split('\n')
  for at in sorted(rng.sample(others, min(3, len(others))), reverse=True):
    body = rows[at - 1]
    indent = body[: len(body) - len(body.lstrip())]
    rows.insert(at - 1, f'{indent}# {rng.choice(_COMMENTS)}')
    line += at <= line
  return '\n'.join(rows), line


def name(env: Environment, family: str, id_: str) -> str:
  """Name of a task directory."""
  import hashlib

  digest = hashlib.sha256(id_.encode()).hexdigest()[:10]
  return f'{env.source.name}-{family}-{digest}'


def marked(family: str, mutations: Sequence[Mutation], diff: str) -> str:
  """The part of a candidate that is its own, its words different in each family."""
  head = ' '.join(f'{family}:{m.path}:{m.function}:{m.kind}:{m.at}' for m in mutations)
  lines = [
    l for l in diff.splitlines() if l[:1] in '+-' and l[:3] not in ('+++', '---')
  ]
  return '\n'.join([head, *(f'{family}_{i} {l}' for i, l in enumerate(lines))])
