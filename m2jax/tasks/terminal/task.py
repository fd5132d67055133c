"""Draws the specs of terminal tasks and builds the tasks (docs/design.md §3).

A spec has everything its task needs, including settings that differ from the default.
Both functions are pure: the same arguments give the same task in every
process with the same Python version (the files are those of its standard library).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.tasks import task as task_lib
from m2jax.tasks import verify
from m2jax.tasks.terminal import corpus, draw, shell
from m2jax.tasks.terminal.config import TerminalConfig
from m2jax.tasks.terminal.steps import FAMILIES

SPLITS = corpus.SPLITS
_DEFAULT = TerminalConfig()
_MAX_DRAWS = 2000


@dataclasses.dataclass(frozen=True)
class TerminalTask:
  """A `tasks.Task` over a workspace of files, with the one tool `sh`.

  Attributes:
    files: the workspace at the start: relative POSIX path -> content.
    expected: the end state that counts as success.
    params: the family's random choices, for the teacher; agents never see them.
  """

  spec: str
  family: str
  split: str
  instruction: str
  max_tool_calls: int
  baseline_calls: int
  files: Mapping[str, bytes]
  expected: verify.Expected
  params: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
  tools: Sequence[Mapping[str, Any]] = (shell.TOOL,)

  @contextlib.asynccontextmanager
  async def open(self, **create_options: Any) -> AsyncIterator[task_lib.Environment]:
    """Opens a sandbox with the files; see `tasks.Task.open`."""
    async with await sandbox.create(contents=self.files, **create_options) as box:
      yield task_lib.Environment(shell.executor(box), box.workspace, box)

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """The verdict on the files and the answer; see `tasks.Task.verify`."""
    return self.expected(environment.workspace, answer)


def families(config: TerminalConfig) -> Mapping[str, float]:
  """Relative frequency of each family; equal if the config has no weights."""
  return dict(config.weights) or dict.fromkeys(FAMILIES, 1.0)


def spec(
  split: str,
  index: int,
  seed: int = 0,
  config: TerminalConfig = _DEFAULT,
  family: str | None = None,
) -> str:
  """Returns the spec of the index-th task of a stream.

  Args:
    split: 'train', 'dev' or 'held_out'; they share no file and no word.
    index: position in the stream, >= 0.
    seed: seed of the stream.
    config: settings; its weights are the frequencies of the families.
    family: family of the task; None samples one.

  Raises:
    ValueError: unknown split or family, negative index, or no positive weight.
  """
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {SPLITS}')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  weights = families(config)
  for name in (*weights, *([family] if family else [])):
    if name not in FAMILIES:
      raise ValueError(f'unknown family {name!r}: expected one of {sorted(FAMILIES)}')
  if min(weights.values()) < 0 or not sum(weights.values()) > 0:
    raise ValueError(
      f'TerminalConfig.weights are {weights}: expected none below 0 and some above'
    )
  if family is None:
    names = sorted(weights)
    rng = random.Random(f'family/{split}/{seed}/{index}')
    family = rng.choices(names, [weights[name] for name in names])[0]
  changes = config.changes()
  name = f'terminal/{split}/{family}/{seed}/{index}'
  return f'{name}?{changes}' if changes else name


@functools.lru_cache(maxsize=4096)
def make(spec: str) -> TerminalTask:
  """Returns the task that a spec names.

  Raises:
    ValueError: `spec` does not come from `terminal.spec`.
  """
  name, _, changes = spec.partition('?')
  parts = name.split('/')
  if (
    len(parts) != 5
    or parts[0] != 'terminal'
    or parts[1] not in SPLITS
    or parts[2] not in FAMILIES
  ):
    raise ValueError(
      f'{spec!r} is no terminal task: expected terminal/SPLIT/FAMILY/SEED/INDEX'
    )
  config = TerminalConfig.from_changes(changes)
  split, family = parts[1:3]
  source = draw.Draw(split, random.Random(spec), config)
  for _ in range(_MAX_DRAWS):
    try:
      draft = FAMILIES[family].build(source)
      break
    except draw.Redraw:
      continue
  else:
    raise ValueError(
      f'{spec!r}: no task found in {_MAX_DRAWS} draws; relax the settings'
    )
  return TerminalTask(
    spec=spec,
    family=family,
    split=split,
    instruction=draft.instruction,
    files=_encode(draft.files),
    max_tool_calls=draft.calls + config.spare_calls,
    baseline_calls=draft.calls,
    expected=verify.Expected(
      _encode(draft.after),
      draft.answer,
      before=_encode(draft.files),
      partial_credit=config.partial_credit,
    ),
    params=draft.params,
  )


def _encode(files: draw.Files) -> dict[str, bytes]:
  return {name: draw.encode(lines) for name, lines in files.items()}
