"""Evaluates the engine's weights on a split of the tasks and records the success.

And says whether a curve of evaluations has stopped improving (`Plateau`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from m2jax import tasks as tasks_lib
from m2jax.agents import episodes
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles.in_process import Rollouts
from m2jax.observe import progress
from m2jax.observe.metrics import MetricsWriter
from m2jax.records import Trajectory
from m2jax.rl import rewards


class Cancelled(Exception):
  """The evaluation was stopped."""


@dataclasses.dataclass(frozen=True)
class Tally:
  """Number of successes and of judged tasks, for one part of an evaluation.

  Attributes:
    family: name of the family or of a domain, or 'all'.
    calls: tool calls that the tasks need (`Task.baseline_calls`); None for 'all' and
      for a domain.
    wall_s: mean seconds of an episode.
    parallel_calls: share of the tool calls that share a turn with others; None without
      calls.
  """

  family: str
  calls: int | None
  successes: float
  n: int
  wall_s: float = float('nan')
  parallel_calls: float | None = None


def success_on(
  roles: Rollouts,
  split: str,
  tasks: int,
  temperature: float,
  on_progress: Callable[[float], None] = lambda f: None,
  stop: Callable[[], bool] = lambda: False,
) -> list[Tally]:
  """Runs one episode on each of the first `tasks` tasks of a split.

  Returns:
    The tally of all tasks, then those by domain, by family and number of calls.

  Raises:
    RolloutsFailed: every episode ended with an infrastructure failure, or the engine
      has stopped.
    Cancelled: `stop()`, which is asked while episodes run.
  """
  specs = [tasks_lib.spec(roles.config.tasks, split, i) for i in range(tasks)]
  done = 0
  doing = f'evaluating {split}' + (', greedy' if temperature == 0 else '')
  progress.report(doing, done, len(specs))

  def check():
    if stop():
      raise Cancelled
    if not roles.scheduler.alive:
      raise RolloutsFailed(
        f'the rollout engine has stopped: {roles.scheduler.stopped_reason}'
      )

  def on_end(trajectory: Trajectory):
    nonlocal done
    done += 1
    roles.pool.add_trajectory(trajectory)
    on_progress(done / len(specs))
    progress.report(doing, done, len(specs))

  out = episodes.evaluate(
    roles.runner,
    specs,
    temperature=temperature,
    deadline_s=roles.config.episodes.evaluation_deadline_s,
    on_end=on_end,
    check=check,
  )
  progress.report('')
  check()  # else the last episodes may have failed for that reason
  tallies = tally(out)
  if out and not tallies:
    raise RolloutsFailed(
      f'none of the {len(out)} episodes on the split {split!r} could be judged; the '
      f'last failed with: {out[-1].error}'
    )
  return tallies


def tally(out: Sequence[Trajectory]) -> list[Tally]:
  """Tallies of judged episodes: all, then by domain, by family and number of calls."""
  cells: dict[tuple[str, int | None], list[Trajectory]] = collections.defaultdict(list)
  for t in out:
    if t.end_reason != 'infrastructure':  # not the policy's failure
      calls = tasks_lib.make(t.task).baseline_calls
      domain = [(t.domain, None)] if t.domain else []
      for cell in (('all', None), *domain, (t.family, calls)):
        cells[cell].append(t)
  order = sorted(cells, key=lambda cell: (cell[0] != 'all', cell[0], cell[1] or 0))
  return [
    Tally(
      *cell,
      successes=sum(t.success for t in cells[cell]),
      n=len(cells[cell]),
      wall_s=sum(t.wall_s for t in cells[cell]) / len(cells[cell]),
      parallel_calls=rewards.parallel_share(cells[cell]),
    )
    for cell in order
  ]


def evaluate(
  roles: Rollouts,
  metrics: MetricsWriter,
  *,
  stage: str,
  step: int,
  split: str,
  tasks: int,
  temperature: float = 1.0,
  on_progress: Callable[[float], None] = lambda f: None,
  stop: Callable[[], bool] = lambda: False,
) -> float:
  """Evaluates the engine's weights, records the tallies, returns the success rate."""
  tallies = success_on(roles, split, tasks, temperature, on_progress, stop)
  for tally in tallies:
    known = {'calls': tally.calls, 'parallel_calls': tally.parallel_calls}
    metrics.write(
      'eval',
      step,
      stage=stage,
      split=split,
      temperature=temperature,
      family=tally.family,
      successes=float(tally.successes),
      n=tally.n,
      wall_s=tally.wall_s,
      **{name: value for name, value in known.items() if value is not None},
    )
  return tallies[0].successes / max(tallies[0].n, 1) if tallies else 0.0


class Plateau:
  """Early stopping: the values of one metric in order of training; larger is better.

  Example:
    >>> curve = Plateau([0.2, 0.5, 0.5, 0.4])
    >>> curve.flat(patience=2), curve.flat(patience=3), curve.flat(patience=0)
    (True, False, False)
  """

  def __init__(self, values: Iterable[float] = ()):
    self.values = list(values)

  def add(self, value: float) -> None:
    self.values.append(float(value))

  def flat(self, patience: int) -> bool:
    """Whether none of the last `patience` values exceeds the best before them."""
    if not patience or len(self.values) <= patience:
      return False
    return max(self.values[-patience:]) <= max(self.values[:-patience])
