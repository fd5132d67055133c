"""The white-box agent, judged by the length of its last message.

A policy that has learned nothing has groups with and without advantages.
"""

from __future__ import annotations

import dataclasses

from m2jax.agents import whitebox


@dataclasses.dataclass(frozen=True)
class Config(whitebox.WhiteboxConfig):
  kind: str = 'tests.forge.roles.parity'


class Parity(whitebox.Whitebox):
  async def reward(self, task, environment, outcome):
    return float(len(str(outcome.messages[-1])) % 2)


make = Parity
