"""The pipeline `reasoning`: reasoning-gym's problems as proved Harbor tasks.

Stages beside the report's (docs/facts/m2-and-forge.md §4): queries by generator and
level; answers checked by the package's scorer (`tasks.reasoning.problems.defect`);
near-duplicates and evaluation sets out; the strict verifier, proved in the sandbox. A
source is a generator, so that no generator is in two splits.

The task kind `reasoning` draws the same problems without a sandbox: `details.spec`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import inspect
import itertools
import shlex
import time

from m2jax.checks import require
from m2jax.tasks import harbor
from m2jax_pipelines import reasoning_facts
from m2jax_pipelines.candidate import Candidate, PipelineConfig
from m2jax_pipelines.context import Context
from m2jax_pipelines.llm import SCRIPTED
from m2jax_pipelines.tasks.reasoning import problems, strict

# Where Harbor runs it, the variables are not set.
_TEST = """\
echo 'm2jax: ready'
tests="${M2JAX_TESTS:-/tests}"
python3 -I "$tests/strict.py" "${M2JAX_TREE:-/workspace}/answer.txt" \\
  "$tests/expected.txt" "${M2JAX_LOGS:-/logs/verifier}/reward.txt"
"""
_MAX_LEAD = 3  # problems with one answer, more than with all others together
_SOLVE = 'printf %s {answer} > "${{M2JAX_WORKSPACE:-/workspace}}/answer.txt"\n'


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """Attributes:
  generators: sources; those of `dev` and `held_out` are not trained.
  levels: difficulties, steps of the generators' curricula.
  max_rounds: problems tried of each generator and level.
  """

  kind: str = 'reasoning'
  near_duplicate: float = 0.6  # of the facts: `reasoning_facts`
  dev: tuple[str, ...] = problems.DEV
  held_out: tuple[str, ...] = problems.HELD_OUT
  generators: tuple[str, ...] = problems.TRAIN + problems.DEV + problems.HELD_OUT
  levels: tuple[int, ...] = (0, 1, 2)
  max_rounds: int = 1000

  def __post_init__(self):
    super().__post_init__()
    # A word that an author changes can be one that the answer depends on.
    own = not self.author.url
    require(self, own, 'author', "without url: statements are the package's own texts")


async def candidates(config: Config, context: Context):
  """Problems by round, level and generator, with no answer that is right too often."""
  balance = _Balance()
  for number in range(config.max_rounds):
    for level, generator in itertools.product(config.levels, config.generators):
      yield await asyncio.to_thread(
        _candidate, config, generator, level, number, balance
      )


class _Balance:
  """Keeps one answer from being right for most problems of a generator and level.

  Otherwise a policy gains by that answer alone, whatever is asked.
  """

  def __init__(self):
    self._answers = collections.defaultdict(collections.Counter)

  def refuses(self, generator: str, level: int, answer: str) -> bool:
    """Whether one more such problem is too many; counts it if not."""
    seen = self._answers[generator, level]
    if 2 * seen[answer] - seen.total() >= _MAX_LEAD:
      return True
    seen[answer] += 1
    return False


def _candidate(config, generator, level, number, balance) -> Candidate:
  started = time.monotonic()
  split = config.split(generator)
  spec = f'reasoning/{split}/{generator}/{level}/{config.seed}/{number}'
  problem = problems.draw(generator, level, f'{spec}/0')
  reason = problems.defect(generator, level, f'{spec}/0')
  if not reason and balance.refuses(generator, level, problem.answer):
    reason = 'most problems before it have the same answer'
  return Candidate(
    id=spec,
    stage=f'level {level}',
    family=generator,
    source=generator,
    draft=None if reason else _draft(spec, generator, level, problem),
    text=problem.question,
    own=reasoning_facts.facts(generator, problem),
    reason=reason,
    wall_s=time.monotonic() - started,
  )


def _draft(spec, generator, level, problem) -> harbor.Draft:
  answer = problem.answer
  solve = _SOLVE.format(answer=shlex.quote(answer))
  source = {
    'name': problems.PACKAGE,
    'version': problems.version(),
    'record_sha256': problems.record_sha256(),
    'licence': problems.LICENCE,
  }
  return harbor.Draft(
    name=spec.removeprefix('reasoning/').replace('/', '-'),
    instruction=(
      f'{problem.question}\n\nWrite the answer, and nothing else, to answer.txt.\n'
    ),
    metadata=harbor.Metadata(
      'reasoning',
      generator,
      collect=('answer.txt',),
      max_tool_calls=8,
      source=source,
      details={'spec': spec, 'level': level, 'author': SCRIPTED},
    ),
    tests={
      'test.sh': _TEST.encode(),
      'strict.py': inspect.getsource(strict).encode(),
      'expected.txt': answer.encode(),
    },
    solution={'solve.sh': solve.encode()},
    verifier_s=20.0,
  )
