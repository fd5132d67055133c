"""SWE-scaling: repair, test and review tasks from Python packages.

The report's six stages: `collect` and `releases`, `environment`, tags and routing
(`releases`), rewards by kind (`grade`), `statements`, and the transformations of
`mutate`, `inject` and `slow`. docs/pipelines_swe.md.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import AsyncIterator

from absl import logging

from m2jax_pipelines.candidate import Candidate
from m2jax_pipelines.context import Context
from m2jax_pipelines.swe import collect, environment, inject, releases, slow
from m2jax_pipelines.swe.config import INJECTED, Config

_AHEAD = 2


async def candidates(config: Config, context: Context) -> AsyncIterator[Candidate]:
  """Candidates of all packages in rotation, each package's real changes first.

  Candidates of the next `_AHEAD` turns are made while the caller tries the current
  ones.
  """
  waiting = collections.deque(
    (collect.name_of(name), _package(name, config, context)) for name in config.packages
  )
  coming: collections.deque[tuple] = collections.deque()

  def begin() -> None:
    while waiting and len(coming) < _AHEAD:
      name, stream = waiting.popleft()
      coming.append((name, stream, asyncio.create_task(_turn(stream, config.batch))))

  try:
    begin()
    while coming:
      name, stream, made = coming[0]
      context.say(name)
      turn = await made
      coming.popleft()
      if len(turn) == config.batch:
        waiting.append((name, stream))
      begin()
      for candidate in turn:
        yield candidate
  finally:
    for *_, made in coming:
      made.cancel()
    await asyncio.gather(*(made for *_, made in coming), return_exceptions=True)
    for _, stream, *_ in (*coming, *waiting):
      await stream.aclose()


async def _turn(stream: AsyncIterator[Candidate], most: int) -> list[Candidate]:
  """The next of a package, fewer than `most` if there are no more."""
  made = []
  async for candidate in stream:
    made.append(candidate)
    if len(made) == most:
      break
  return made


async def _package(requirement: str, config: Config, context: Context):
  """Candidates of one package, which is made to run first."""
  name, started = collect.name_of(requirement), time.monotonic()
  try:
    source = await collect.fetch(requirement, context.directory('sources'))
    limits = config.repairs, config.test_s, config.suite_s
    env = await environment.build(source, context.dataset, *limits)
  except (collect.CollectError, environment.NoEnvironment) as error:
    logging.warning('%s: %s', name, error)
    failed = _stage(requirement, name, str(error), time.monotonic() - started)
    no_answer = isinstance(error, collect.CollectError)  # of the registry
    yield dataclasses.replace(failed, invalid=no_answer)
    return
  facts = {
    'tests': len(env.status),
    'suite_s': round(sum(env.seconds.values()), 2),
    'repairs': list(env.repairs),
    **source.provenance,
  }
  yield _stage(requirement, name, '', time.monotonic() - started, facts)
  if 'release' in config.families and config.releases:
    async for candidate in releases.candidates(env, config, context):
      yield candidate
  async for candidate in _injected_and_slowed(env, config, context):
    yield candidate


async def _injected_and_slowed(env, config: Config, context: Context):
  """Injected bugs; a task of performance is looked for after every n-th candidate.

  Candidates of the runs that this one continues count.
  """
  slowed = slow.candidates(env, config, context)
  number = sum(
    row['source'] == env.source.name and row['family'] in INJECTED
    for row in context.rows
  )
  if set(config.families) & set(INJECTED):
    async for candidate in inject.candidates(env, config, context):
      yield candidate
      number += 1
      if 'performance' in config.families and number % config.slow == 0:
        async for found in slowed:
          yield found
          if not found.reason:
            break
  if 'performance' in config.families:
    async for candidate in slowed:
      yield candidate


def _stage(requirement, name, reason, wall_s, facts=None) -> Candidate:
  return Candidate(
    id=f'environment/{requirement}',
    stage='environments',
    family='environment',
    source=name,
    reason=reason,
    passed=not reason,
    wall_s=wall_s,
    facts=facts or {},
  )


__all__ = ['Config', 'candidates']
