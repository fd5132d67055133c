"""The kind `bfcl`: BFCL v4's stateful multi-turn tools as episodes.

Data and tools are those of the installed package bfcl-eval (Apache-2.0); none are part
of this repository. `pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0`: its own
requirements pin old releases of numpy and others, and are not needed.

The tools of an episode run in a child process of its own (`backend`). A BFCL entry has
several user turns: the first is the instruction, and the tool `next_request`, which is
ours, ends a turn and returns the next one. Each turn is judged when it ends, as
`multi_turn_checker.py` does: the state equals that of the reference calls, and the
results so far contain those of the turn's reference calls.

A spec is `bfcl/SPLIT/NUMBER`, of the category multi_turn_base.
"""

from m2jax_pipelines.tasks.bfcl.task import BfclTask, Config, families, make, spec

__all__ = ['BfclTask', 'Config', 'families', 'make', 'spec']
