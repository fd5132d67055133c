"""An agent whose prompts and tool names vary from task to task.

M2 is trained with perturbed scaffolds: system prompts, instructions and definitions of
tools vary, so that it depends on no single form (docs/facts/m2-and-forge.md §2.3). The
variant is drawn by the task's spec, so that all attempts at a task have one prompt, and
demonstrations are shown as the agent would show them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.agents.agent import AgentConfig, Shown
from m2jax.agents.by_task import ByTask
from m2jax.agents.whitebox import WhiteboxConfig
from m2jax.checks import require


@dataclasses.dataclass(frozen=True)
class Config(AgentConfig):
  """The agent and its variants; an empty list leaves the agent's own.

  Attributes:
    agent: the agent.
    systems: system prompts.
    instructions: texts around `{instruction}`.
    renames: each name of a tool or argument of the task's -> what the model is shown.
    seed: seed of the draw.
  """

  kind: str = 'perturbed'
  agent: AgentConfig = WhiteboxConfig()
  systems: Sequence[str] = ()
  instructions: Sequence[str] = ()
  renames: Sequence[Mapping[str, str]] = ()
  seed: int = 0

  def __post_init__(self):
    require(self, self.agent.kind == 'whitebox', 'agent', 'of the kind whitebox')
    require(self, self.system is None, 'system', "None: 'systems' has the prompts")
    for name, values in self._varied():
      for value in values:  # the agent's config checks it
        dataclasses.replace(self.agent, **{name: value})

  def of_task(self, spec: str) -> AgentConfig:
    """The variant of a task: the same in every process."""
    rng = random.Random(f'{self.seed}/{spec}')
    drawn = {name: rng.choice(list(values)) for name, values in self._varied()}
    return dataclasses.replace(self.agent, **drawn)

  def shown(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
  ) -> list[Shown]:
    """Not defined: it depends on the task (`of_task`)."""
    raise TypeError('perturbed: ask of_task(spec)')

  def _varied(self) -> list[tuple[str, Sequence]]:
    found = dict(
      system=self.systems, instruction=self.instructions, rename=self.renames
    )
    return [(name, values) for name, values in found.items() if values]


make = ByTask
