"""Scripted solvers of different ability, and the difficulty that their rates say.

The report's stage 3 takes a reference solver's pass rate and the number of repairs
(docs/facts/m2-and-forge.md). Here

    nothing   does nothing
    example   runs the command of the seed's example, as a beginner would
    first     runs the first step of the solution
    partial   runs all steps but the last
    untidy    solves it and leaves a temporary file
    literal   solves it with the values that the statement gives, and nothing else
    noisy     solves it, with a fault in each step with probability 0.3: a wrong flag,
              or the step left out; several trials
    full      the solution

Rates are those of scripts, not of models: they order tasks by the number of steps that
can go wrong and by what a statement leaves to be found.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from m2jax import sandbox
from m2jax.tasks import harbor
from m2jax.tasks.harbor import verifier
from m2jax_pipelines.terminal_gym.drawn import Drawn, script

FAULTS = 0.3
_UNKNOWN = 'unknown'
_LIMITS = sandbox.Limits(wall_s=30.0)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What the solvers reached.

  Attributes:
    rates: solver → share of its trials that passed.
    rate: mean over the solvers other than the reference.
    bucket: 'easy', 'medium' or 'hard'; 'all' if every solver passes, 'reference' if
      none but the reference does.
    full: verdict on the reference.
  """

  rates: dict[str, float]
  rate: float
  bucket: str
  full: verifier.Verdict

  def facts(self) -> dict:
    return {'rates': self.rates, 'rate': round(self.rate, 4), 'bucket': self.bucket}


def scripts(
  drawn: Drawn, statement: str, trials: int, seed: str
) -> Iterator[tuple[str, str]]:
  """Yields (solver, its shell script); those with several trials come several times."""
  commands, values = drawn.commands, drawn.values
  yield 'nothing', script(())
  yield 'example', script([drawn.filled(drawn.example)])
  yield 'first', script(map(drawn.filled, commands[:1]))
  yield 'partial', script(map(drawn.filled, commands[:-1]))
  yield 'untidy', script([*map(drawn.filled, commands), 'date > result.tmp'])
  known = {slot: v if v in statement else _UNKNOWN for slot, v in values.items()}
  yield 'literal', script(drawn.filled(c, known) for c in commands)
  for trial in range(trials):
    rng = random.Random(f'{seed}/{trial}')
    yield 'noisy', script(map(drawn.filled, _with_faults(drawn, rng)))
  yield 'full', script(map(drawn.filled, commands))


def _with_faults(drawn: Drawn, rng: random.Random) -> list[str]:
  done = []
  for command in drawn.commands:
    if rng.random() < FAULTS:
      fitting = [slip for slip in drawn.slips if slip[0] in command]
      if not fitting:
        continue
      command = command.replace(*rng.choice(fitting))
    done.append(command)
  return done


async def attempt(
  task: harbor.HarborTask, command: str, backend: str
) -> verifier.Verdict:
  """The verdict on what a script leaves; a failing script is judged as it ends."""
  async with task.open(backend=backend, limits=_LIMITS) as environment:
    await environment.box.exec(command)
    return await task.judge(environment)


async def calibrate(
  directory: harbor.Directory,
  drawn: Drawn,
  *,
  trials: int,
  backend: str,
  seed: str,
  judged: dict[str, verifier.Verdict],
) -> Calibration:
  """Lets every solver attempt a task.

  Args:
    directory: the task.
    drawn: what it was made of.
    trials: trials of the noisy solver.
    backend: backend of the sandboxes.
    seed: seed of the faults.
    judged: verdicts by script, for all statements of a draw: their tests are the same.

  Raises:
    SandboxError: the machine failed, or the workspace cannot be set up.
  """
  task = harbor.of_directory(directory)
  passed: dict[str, list[bool]] = {}
  verdicts: dict[str, verifier.Verdict] = {}
  for solver, command in scripts(drawn, directory.instruction, trials, seed):
    if command not in judged:
      judged[command] = await attempt(task, command, backend)
    verdict = verdicts[solver] = judged[command]
    if verdict.outcome == verifier.INVALID:
      raise verifier.InvalidVerdict(f'{solver}: {verdict.reason}')
    passed.setdefault(solver, []).append(verdict.outcome == verifier.PASSED)
  rates = {solver: sum(found) / len(found) for solver, found in passed.items()}
  others = [rate for solver, rate in rates.items() if solver != 'full']
  rate = sum(others) / len(others)
  return Calibration(rates, rate, bucket(rates), verdicts['full'])


def bucket(rates: dict[str, float]) -> str:
  """The bucket of solvers' rates."""
  others = [rate for solver, rate in rates.items() if solver != 'full']
  if not any(others):
    return 'reference'
  if all(rate == 1 for rate in others):
    return 'all'
  rate = sum(others) / len(others)
  return 'hard' if rate < 0.15 else 'medium' if rate < 0.3 else 'easy'
