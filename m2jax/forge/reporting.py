"""What a finished run is told in: the report's input, made from metrics and pool."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2jax.forge.config import ForgeConfig
from m2jax.observe import metrics as metrics_lib
from m2jax.observe import report
from m2jax.rl import windowed_fifo
from m2jax.rl.data_pool import DataPool, StoredTrajectory
from m2jax.rl.records import Completion
from m2jax.rl.rewards import TrajectoryReward

_SHOWN_EPISODES = 60  # of training and of evaluation each


def write(
  config: ForgeConfig, workdir: Path, pool: DataPool
) -> list[report.Evaluation]:
  """Writes `report.html`; returns its headline rows."""
  records = metrics_lib.read(workdir)
  evaluations = report.evaluations(records)
  shown = [
    _episode(stored, pool)
    for evaluation in (False, True)
    for stored in pool.sample_trajectories(
      _SHOWN_EPISODES, seed=config.seed, evaluation=evaluation
    )
  ]
  rl = config.rl
  window = None
  if rl is not None:
    window = rl.window
    if window == 'default':
      window = windowed_fifo.default_window(rl.capacity)
  report.write_report(
    workdir / 'report.html',
    records,
    shown,
    report.Summary(
      'm2jax forge',
      evaluations,
      facts=_facts(records),
      capacity_items=rl.capacity if rl is not None else None,
      window_items=window,
    ),
    json.loads(json.dumps(dataclasses.asdict(config))),
  )
  return evaluations


def _facts(records) -> dict[str, Any]:
  steps = dict.fromkeys(('sft', 'rl'), 0)
  for record in records:
    if record['phase'] in steps:
      steps[record['phase']] = max(steps[record['phase']], record['step'])
  wall_s = records[-1]['time_s'] - records[0]['time_s'] if records else 0.0
  return {
    'SFT steps': steps['sft'],
    'RL updates': steps['rl'],
    'wall-clock': f'{wall_s / 60:.1f} min',
  }


def _episode(stored: StoredTrajectory, pool: DataPool) -> report.Episode:
  t, reward = stored.trajectory, stored.reward
  completions = pool.completions(t.session)
  return report.Episode(
    phase='rl' if t.item >= 0 else 'eval',
    step=max((v for c in completions for v in c.versions), default=0),
    family=t.family,
    task=t.task,
    success=t.success,
    messages=t.messages,
    turns=_turns(completions, reward),
    reward=reward.total if reward is not None else None,
    ended=t.ended,
    reason=t.reason,
    wall_s=t.wall_s,
  )


def _turns(
  completions: Sequence[Completion], reward: TrajectoryReward | None
) -> list[report.Turn]:
  """One for each completion that the agent acted on, as its messages are.

  Trained turns show the advantage that the learner recorded, also once the pool has
  pruned the completions.
  """
  if reward is None:
    acted = [c for c in completions if c.finish_reason != 'cancelled']
    return [_turn(c) for c in acted if c.response_ids]
  by_turn = {c.turn: c for c in completions}
  return [_turn(by_turn.get(turn), advantage) for turn, advantage in reward.advantages]


def _turn(completion: Completion | None, advantage: float | None = None) -> report.Turn:
  if completion is None:
    return report.Turn(advantage)
  return report.Turn(
    advantage=advantage,
    versions=sorted(set(completion.versions)),
    response_tokens=len(completion.response_ids),
    status=completion.status,
  )
