"""The toy pipeline with a pause before each candidate, so that a run can be stopped.

`python -m tests.pipelines.slow_toy DIRECTORY` makes 40 tasks of the one without.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import sys

from m2jax_pipelines import make
from tests.pipelines import toy


@dataclasses.dataclass(frozen=True)
class Config(toy.Config):
  """See `toy.Config`."""

  kind: str = 'tests.pipelines.slow_toy'
  kinds: str = 'gggggg'


async def candidates(config, context):
  async for candidate in toy.candidates(config, context):
    await asyncio.sleep(0.2)
    yield candidate


if __name__ == '__main__':
  many = toy.Config(kinds='g' * 40, count=40, parallel=1)
  asyncio.run(make.run(many, pathlib.Path(sys.argv[1]), show=False))
