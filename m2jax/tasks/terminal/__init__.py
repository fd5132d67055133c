"""Shell tasks over private workspaces of real files (DESIGN §3, tasks/).

`spec` draws the spec of the index-th task of a split; `make` builds that task. A spec
has everything its task needs, including settings that differ from the default:

    terminal/held_out/steps_3/7/12            split, family, seed, index
    terminal/train/trail/7/12?{"files":[4,6]}
"""

from m2jax.tasks.terminal.config import TerminalConfig
from m2jax.tasks.terminal.steps import FAMILIES
from m2jax.tasks.terminal.task import SPLITS, TerminalTask, families, make, spec
from m2jax.tasks.terminal.teacher import TeacherConfig, demonstrate, lesson

Config = TerminalConfig

__all__ = [
  'FAMILIES',
  'SPLITS',
  'Config',
  'TeacherConfig',
  'TerminalConfig',
  'TerminalTask',
  'demonstrate',
  'families',
  'lesson',
  'make',
  'spec',
]
