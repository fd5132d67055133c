"""The main job: runs its phases in order, resumes where it stopped, reports.

With several processes this is what process 0 does; the others follow
(`processes.follow`).
Process 0 has everything that is not on the mesh: pool, gateway, agents, rollout engine
(on one of its own devices), metrics, view and budget.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from absl import logging

from m2jax import forest
from m2jax import sharding as sharding_lib
from m2jax import tasks as tasks_lib
from m2jax.forge import evaluation, prepare, reporting, rl_loop, shared
from m2jax.forge.config import ForgeConfig
from m2jax.forge.processes import follow, lead
from m2jax.forge.processes.commands import Commands
from m2jax.forge.roles import in_process
from m2jax.observe import findings
from m2jax.observe import metrics as metrics_lib
from m2jax.observe.terminal import RunView
from m2jax.pool import data_pool
from m2jax.sharding import Sharding
from m2jax.train.workdir import open_workdir

Rollouts = Callable[..., AbstractContextManager[in_process.Rollouts]]
# Examines a workdir while it is open, and passes on what it finds (`evolve.doctor`,
# which is after this package).
Watch = Callable[
  [Path, Callable[[Sequence[findings.Shown]], None]], AbstractContextManager[Any]
]

UNTRAINED = -1  # policy version of random weights; SFT's is 0, RL continues from it
AFTER_SFT, AFTER_MORE_SFT, AFTER_RL = 'after SFT', 'after more SFT', 'after RL'
DURING_RL = 'during RL'


def run(
  config: ForgeConfig,
  workdir: Path,
  fresh: bool = False,
  sharding: Sharding | None = None,
  rollouts: Rollouts = in_process.rollouts,
  commands: Commands | None = None,
  *,
  publishes: bool = False,
  watch: Watch = lambda workdir, show: nullcontext(),
) -> list:
  """Runs or resumes the job; returns the held-out evaluations in order of stage.

  Every process of the job calls it with the same arguments. Only process 0 returns
  evaluations.

  Args:
    config: the settings.
    workdir: the run's workdir, on storage that the processes share.
    fresh: delete the run that it holds.
    sharding: the mesh to train on; None is the config's.
    rollouts: starts what produces trajectories, or the access to it (`roles.learner`);
      with the arguments of `in_process.rollouts`.
    commands: process 0's commands to the others.
    publishes: whether `rollouts` takes weights as they are on the mesh; else as a copy
      on one device of process 0.
    watch: examines the run while it trains, in process 0.
  """
  sharding = sharding_lib.make(config.mesh) if sharding is None else sharding
  served = sharding_lib.local_copy
  if publishes:
    served = functools.partial(prepare.on_mesh, config=config, sharding=sharding)
  if jax.process_index():
    follow.run(config, workdir, sharding, served)
    return []
  commands = commands or Commands()
  with commands.leading():
    _check_splits(config)
    open_workdir(config.anywhere(), workdir, fresh)
    commands.send('begin')
    with (
      metrics_lib.MetricsWriter(workdir) as metrics,
      RunView(_expected_s(config)) as view,
      shared.claim_pool(config, workdir) as pool,
    ):
      for record in metrics_lib.read(workdir):
        view.on_record(record)
      metrics.add_listener(view.on_record)
      rollouts = functools.partial(rollouts, config)
      made = _Run(config, workdir, metrics, view, pool, commands, sharding, served)
      with watch(workdir, view.set_findings):
        made.phases(rollouts)
        view.begin('report')  # the last examination is a part of it
      metrics.flush()
      evaluations = reporting.write(config, workdir, pool)
      view.done()
  return evaluations


def _check_splits(config: ForgeConfig) -> None:
  """Raises ValueError if a split has no task, which is used only after the training."""
  dev_tasks = max(config.dev_tasks, config.rl.dev_tasks if config.rl else 0)
  for split, count in (('dev', dev_tasks), ('held_out', config.eval_tasks)):
    for index in range(count):
      tasks_lib.spec(config.tasks, split, index)


def _expected_s(config: ForgeConfig) -> dict[str, float]:
  """Estimated seconds of each phase, for its share of the whole."""
  eval_s = 0.1 * (config.eval_tasks + config.dev_tasks)
  seconds = {
    'demonstrations': 0.015 * config.sft.demonstrations,
    'tokenizer': 0.001 * config.sft.demonstrations,
    'engine': 30.0,
    'SFT': config.sft.loop.seconds or 0.2 * config.sft.loop.steps,
  }
  if config.start:  # taken from that run
    seconds |= {'demonstrations': 1.0, 'SFT': 1.0}
  else:
    seconds[f'eval {AFTER_SFT}'] = eval_s
  if config.rl is not None:
    seconds |= {
      'RL': config.rl.seconds or 6.0 * config.rl.steps,
      f'eval {AFTER_RL}': 2 * eval_s,
    }
  if config.more_sft is not None:
    seconds |= {
      'more SFT': config.more_sft.loop.seconds or 0.2 * config.more_sft.loop.steps,
      f'eval {AFTER_MORE_SFT}': 2 * eval_s,
    }
  return seconds | {'report': 5.0}


class _Run:
  """The phases of one run; each is skipped or resumed from what it wrote."""

  def __init__(
    self,
    config: ForgeConfig,
    workdir: Path,
    metrics: metrics_lib.MetricsWriter,
    view: RunView,
    pool: data_pool.DataPool,
    commands: Commands,
    sharding: Sharding,
    served: Callable[[Any], Any],
  ):
    self._config, self._workdir = config, workdir
    self._metrics, self._view, self._pool = metrics, view, pool
    self._commands, self._sharding, self._served = commands, sharding, served
    self._measured = {
      (r['stage'], r['split'], r['temperature'])
      for r in metrics_lib.read(workdir, 'eval')
      if r['stage'] != DURING_RL
    }

  def phases(self, rollouts: Rollouts) -> None:
    config, workdir, view = self._config, self._workdir, self._view
    if config.start:
      prepare.take_over(config, workdir)
    view.begin('demonstrations')
    demos = prepare.make_demonstrations(
      config, workdir / prepare.DEMONSTRATIONS, view.set_progress
    )
    solved = sum(demo.success == 1 for demo in demos)
    view.done(f'teacher {solved / len(demos):.2f}')
    view.begin('tokenizer')
    groups, tok, files = prepare.material(config, workdir, demos)
    prepare.check_teachers(config, tok)
    view.done()
    _log_tokens(groups)
    view.begin('engine')
    variables = prepare.start(config, workdir, self._sharding)
    with rollouts(self._served(variables), tok, self._pool, UNTRAINED) as running:
      view.begin('SFT')
      variables, step = self._sft('sft', groups, variables, files, running)
      if not config.start:  # else that run has evaluated these weights
        self._evaluate(AFTER_SFT, step, running)
      if config.rl is not None:
        self._rl(variables, running, files)
      elif config.more_sft is not None:
        view.begin('more SFT')
        _, step = self._sft('more_sft', groups, variables, files, running)
        self._evaluate(AFTER_MORE_SFT, step, running, greedy=True)

  def _sft(self, phase: str, groups, variables, files, running: in_process.Rollouts):
    """Trains the phase and serves its weights; returns them, and their step."""
    self._commands.send('sft', phase=phase)
    tuned = prepare.sft(
      *(self._config, groups, variables, self._workdir, self._metrics, files),
      phase=phase,
      sharding=self._sharding,
    )
    version = 0 if phase == 'sft' else 1
    running.scheduler.update_weights(self._served(tuned.variables), version)
    return tuned.variables, tuned.step

  def _rl(self, variables, running: in_process.Rollouts, files) -> None:
    config, commands = self._config, self._commands
    self._view.begin('RL')
    commands.send('rl')
    of_learner, of_manager = lead.kinds(commands, self._workdir)
    learner = prepare.learner(
      *(config, variables, self._sharding, self._served), make=of_learner
    )
    with prepare.checkpoints(config, self._workdir, of_manager) as manager:
      with rl_loop.RlLoop(
        config,
        running,
        learner,
        manager,
        self._metrics,
        files,
        self._view,
      ) as rl:
        rl.resume()
        rl.run()
    self._evaluate(AFTER_RL, learner.version, running, greedy=True)

  def _evaluate(self, stage: str, step: int, running, greedy: bool = False) -> None:
    """Evaluates a phase's last weights on the development and held-out splits."""
    config, view = self._config, self._view
    view.begin(f'eval {stage}')
    parts, found = [('dev', config.dev_tasks, 1.0)], []
    parts.append(('held_out', config.eval_tasks, 1.0))
    if greedy:
      parts.append(('held_out', config.eval_tasks, 0.0))
    for i, (split, tasks, temperature) in enumerate(parts):
      if not tasks or (stage, split, temperature) in self._measured:
        continue
      started = time.monotonic()
      success = evaluation.evaluate(
        running,
        self._metrics,
        stage=stage,
        step=step,
        split=split,
        tasks=tasks,
        temperature=temperature,
        on_progress=lambda f, i=i: view.set_progress((i + f) / len(parts)),
      )
      seconds = time.monotonic() - started
      logging.info('%s, %s: %.3f in %.0f s', stage, split, success, seconds)
      if temperature:
        found.append(f'{split} {success:.3f}')
    view.done(', '.join(found))


def _log_tokens(groups: list[list[forest.Sample]]) -> None:
  lengths = [len(sample.tokens) for group in groups for sample in group]
  logging.info(
    '%d demonstrations, %d samples of %.0f tokens on average, %d at most',
    len(groups),
    len(lengths),
    sum(lengths) / len(lengths),
    max(lengths),
  )
