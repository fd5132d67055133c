"""Assembles the report of a run from its metrics and its data pool."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

from m2jax.forge.config import ForgeConfig
from m2jax.observe import evaluations, findings, report
from m2jax.observe import metrics as metrics_lib
from m2jax.pool import database, windows
from m2jax.pool.data_pool import DataPool, StoredTrajectory

_SHOWN_EPISODES = 60  # of training and of evaluation each


def write(
  config: ForgeConfig, workdir: Path, pool: DataPool
) -> list[evaluations.Evaluation]:
  """Writes `report.html`; returns its rows of evaluations."""
  records = metrics_lib.read(workdir)
  rows = evaluations.by_stage(records)
  shown = [
    _episode(stored, pool)
    for evaluation in (False, True)
    for stored in pool.sample_trajectories(
      _SHOWN_EPISODES, seed=config.seed, evaluation=evaluation
    )
  ]
  rl = config.rl
  window = windows.make(rl.window).items(rl.capacity) if rl is not None else None
  report.write_report(
    workdir / 'report.html',
    records,
    shown,
    report.Summary(
      'm2jax forge',
      rows,
      facts=_facts(records, pool),
      capacity_items=rl.capacity if rl is not None else None,
      window_items=window,
    ),
    _settings(config),
    findings.read(workdir),
  )
  return rows


def _settings(config: ForgeConfig) -> dict[str, Any]:
  """The run's settings as JSON values, without a password."""
  url = database.shown_url(config.roles.pool_url)
  roles = dataclasses.replace(config.roles, pool_url=url)
  shown = dataclasses.replace(config, roles=roles)
  return json.loads(json.dumps(dataclasses.asdict(shown)))


def _facts(records, pool: DataPool) -> dict[str, Any]:
  steps = dict.fromkeys(('sft', 'rl'), 0)
  for record in records:
    if record['phase'] in steps:
      steps[record['phase']] = max(steps[record['phase']], record['step'])
  wall_s = records[-1]['time_s'] - records[0]['time_s'] if records else 0.0
  facts = {
    'SFT steps': steps['sft'],
    'RL updates': steps['rl'],
    'wall-clock': f'{wall_s / 60:.1f} min',
  }
  if reasons := collections.Counter(pool.failures().values()):
    (reason, n), *_ = reasons.most_common(1)
    facts['failed rollout groups'] = f'{reasons.total()}; {n} of them: {reason[:200]}'
  return facts


def _episode(stored: StoredTrajectory, pool: DataPool) -> report.Episode:
  t, reward = stored.trajectory, stored.reward
  turns = [turn for turn in pool.turns(t.session) if not turn.superseded]
  # Only the turns that the agent acted on were trained and appear in its messages.
  turns = [turn for turn in turns if turn.advantage is not None] or turns
  return report.Episode(
    phase='rl' if t.item >= 0 else 'eval',
    step=max((v for turn in turns for v in turn.versions), default=0),
    family=t.family,
    task=t.task,
    success=t.success,
    messages=t.messages,
    turns=[
      report.Turn(
        advantage=turn.advantage,
        versions=turn.versions,
        response_tokens=turn.response_tokens,
        status=turn.status,
      )
      for turn in turns
    ],
    reward=reward.total if reward is not None else None,
    end_reason=t.end_reason,
    error=t.error,
    wall_s=t.wall_s,
  )
