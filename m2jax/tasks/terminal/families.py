"""Every family of terminal tasks by its name."""

from __future__ import annotations

from collections.abc import Mapping

from m2jax.tasks.terminal import chains, draw, editing, reading, steps

FAMILIES: Mapping[str, draw.Family] = {
  **reading.FAMILIES,
  **editing.FAMILIES,
  **chains.FAMILIES,
  **steps.FAMILIES,
}
