"""The families of tasks, by name."""

from __future__ import annotations

from m2jax_pipelines.terminal_gym.drawn import Family
from m2jax_pipelines.terminal_gym.families import finding, programs, tables, trees

FAMILIES: dict[str, Family] = {
  family.name: family
  for module in (finding, tables, trees, programs)
  for family in module.FAMILIES
}
