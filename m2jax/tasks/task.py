"""A task: an instruction, a private workspace, and a verdict on what became of both.

DESIGN §3 (tasks/). A verdict looks at the workspace and the final answer, never at
the trajectory, so any way to the right end state counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

# Runs a tool call: (tool name, arguments) -> the text to show. Raises BadCall.
Execute = Callable[[str, Mapping[str, Any]], Awaitable[str]]


class BadCall(Exception):
  """A tool call is at fault, not the tool: the text is meant for who made it."""


@dataclasses.dataclass(frozen=True)
class Task:
  """One task, rebuilt from its spec by the family that made it.

  Attributes:
    spec: string from which the same task can be made again.
    family: name of the kind of task; results are reported by it.
    split: 'train' or 'held_out'.
    instruction: what the agent reads as the user's message.
    files: the workspace at the start: relative POSIX path -> content.
    max_tool_calls: tool calls an episode may use.
    baseline_calls: tool calls that suffice; the yardstick of the speed reward.
    verify: `(workspace, final answer) -> success in [0, 1]`. Safe on a workspace that
      an agent filled with links, pipes or huge files. Raises OSError only when the
      workspace itself cannot be read, which is nobody's failure (law 5).
    params: what the family drew, for teachers and reports; agents never see it.
  """

  spec: str
  family: str
  split: str
  instruction: str
  files: Mapping[str, bytes]
  max_tool_calls: int
  baseline_calls: int
  verify: Callable[[Path, str], float]
  params: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
