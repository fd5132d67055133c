"""Admission: a task is proved before anybody trains on it.

1. Doing nothing fails; an invalid verdict does not count as a failure.
2. The solution passes, `passes` times in new sandboxes; a task that passes only
   sometimes is flaky.

A failure of the machine rejects nothing: the candidate is tried again in the next run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from m2jax import sandbox
from m2jax.tasks import harbor
from m2jax.tasks.harbor import verifier


@dataclasses.dataclass(frozen=True)
class Admission:
  """The result.

  Attributes:
    outcome: 'admitted', 'rejected' or 'invalid' (the machine failed).
    reason: why not admitted.
    wall_s: elapsed time of all attempts.
    verifier_s: elapsed time of each run of the verifier.
    evidence: file name → base64: `evidence` of the last details.json.
  """

  outcome: str
  reason: str = ''
  wall_s: float = 0.0
  verifier_s: tuple[float, ...] = ()
  evidence: Mapping[str, str] = dataclasses.field(default_factory=dict)


async def admit(
  directory: harbor.Directory,
  *,
  backend: str,
  limits: sandbox.Limits,
  passes: int = 2,
) -> Admission:
  """Tries a task without a solution, then with it."""
  started, walls, evidence = time.monotonic(), [], {}
  task = harbor.of_directory(directory)

  def result(outcome: str, reason: str = '') -> Admission:
    wall_s = time.monotonic() - started
    return Admission(outcome, reason, wall_s, tuple(walls), dict(evidence))

  try:
    nothing = await _attempt(task, False, backend, limits)
    walls.append(nothing.wall_s)
    if nothing.outcome == verifier.PASSED:
      return result('rejected', 'doing nothing passes')
    if nothing.outcome == verifier.INVALID:
      return result(*_undecided('doing nothing', nothing))
    for number in range(passes):
      solved = await _attempt(task, True, backend, limits)
      walls.append(solved.wall_s)
      evidence = solved.details.get('evidence') or {}
      if solved.outcome == verifier.INVALID:
        return result(*_undecided('the solution', solved))
      if solved.outcome == verifier.FAILED:
        kind = 'flaky: the solution failed later' if number else 'the solution fails'
        return result('rejected', f'{kind}: {solved.reason}')
  except (sandbox.SandboxError, OSError) as error:
    return result('invalid', f'infrastructure: {error}')
  return result('admitted')


def _undecided(who: str, verdict: verifier.Verdict) -> tuple[str, str]:
  infrastructure = verdict.reason.startswith('infrastructure')
  outcome = 'invalid' if infrastructure else 'rejected'
  return outcome, f'no verdict on {who}: {verdict.reason}'


async def _attempt(task, with_solution, backend, limits) -> verifier.Verdict:
  async with task.open(backend=backend, limits=limits) as environment:
    if with_solution:
      done = await task.solve(environment)
      if done.returncode:
        reason = f'solve.sh exited with {done.returncode}: {done.stderr.strip()[-300:]}'
        return verifier.Verdict(verifier.FAILED, reason=reason)
    return await task.judge(environment)
