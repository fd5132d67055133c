"""The toy pipeline with a pause before each candidate, so that a run can be stopped."""

from __future__ import annotations

import asyncio
import dataclasses

from tests.pipelines import toy


@dataclasses.dataclass(frozen=True)
class Config(toy.Config):
  """See `toy.Config`."""

  kind: str = 'tests.pipelines.slow_toy'
  kinds: str = 'gggggg'


async def candidates(config, context):
  async for candidate in toy.candidates(config, context):
    await asyncio.sleep(0.5)
    yield candidate
