"""The main job: runs its phases in order, resumes where it stopped, reports."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import logging

from m2jax import forest
from m2jax import sharding as sharding_lib
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forge import evaluation, prepare, reporting, rl_loop, roles
from m2jax.forge.config import ForgeConfig
from m2jax.observe import metrics as metrics_lib
from m2jax.observe.terminal import RunView
from m2jax.optim import optimizer as optimizer_lib
from m2jax.pool import data_pool
from m2jax.rl.learner import Learner
from m2jax.sharding import MeshConfig
from m2jax.train import step as train_step
from m2jax.train.workdir import open_workdir

UNTRAINED = -1  # policy version of random weights; SFT's is 0, RL continues from it
AFTER_SFT, AFTER_MORE_SFT, AFTER_RL = 'after SFT', 'after more SFT', 'after RL'
DURING_RL = 'during RL'


def run(config: ForgeConfig, workdir: Path, fresh: bool = False) -> list:
  """Runs or resumes the job; returns the held-out evaluations in order of stage."""
  anywhere = dataclasses.replace(config, mesh=MeshConfig())
  open_workdir(anywhere, workdir, fresh)
  with (
    metrics_lib.MetricsWriter(workdir) as metrics,
    RunView(_expected_s(config)) as view,
    data_pool.DataPool(f'sqlite:///{workdir.absolute()}/pool.db') as pool,
  ):
    for record in metrics_lib.read(workdir):
      view.on_record(record)
    metrics.add_listener(view.on_record)
    _Run(config, workdir, metrics, view, pool).phases()
    metrics.flush()
    evaluations = reporting.write(config, workdir, pool)
  return evaluations


def _expected_s(config: ForgeConfig) -> dict[str, float]:
  """Estimated seconds of each phase, for the view's remaining time."""
  eval_s = 0.1 * (config.eval_tasks + config.dev_tasks)
  seconds = {
    'demonstrations': 0.015 * config.sft.demonstrations,
    'SFT': config.sft.loop.seconds or 0.2 * config.sft.loop.steps,
  }
  if config.start:  # taken from that run
    seconds = dict.fromkeys(seconds, 1.0)
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
  return seconds


class _Run:
  """The phases of one run; each is skipped or resumed from what it wrote."""

  def __init__(self, config: ForgeConfig, workdir: Path, metrics, view, pool):
    self._config, self._workdir = config, workdir
    self._metrics, self._view, self._pool = metrics, view, pool
    self._measured = {
      (r['stage'], r['split'], r['temperature'])
      for r in metrics_lib.read(workdir, 'eval')
      if r['stage'] != DURING_RL
    }

  def phases(self) -> None:
    config, workdir, view = self._config, self._workdir, self._view
    if config.start:
      prepare.take_over(config, workdir)
    view.begin('demonstrations')
    demos = prepare.make_demonstrations(
      config, workdir / 'demonstrations.jsonl', view.set_progress
    )
    verified = [demo for demo in demos if demo.success == 1]
    tok = prepare.make_tokenizer(config, verified, workdir / 'tokenizer.json')
    files = {'tokenizer.json': (workdir / 'tokenizer.json').read_bytes()}
    samples = prepare.encode(config, tok, verified)
    view.done(f'teacher {len(verified) / len(demos):.2f}')
    _log_tokens(samples)
    variables = train_step.init_variables(config.model, jax.random.key(config.seed))
    with roles.rollouts(config, variables, tok, self._pool, UNTRAINED) as running:
      with CheckpointManager(workdir / 'sft', keep=1) as manager:
        view.begin('SFT')
        variables = prepare.sft(
          config, samples, variables, manager, self._metrics, files
        )
        running.scheduler.update_weights(jax.tree.map(jnp.copy, variables), 0)
        if not config.start:  # else that run has evaluated these weights
          self._evaluate(AFTER_SFT, manager.latest_step(), running)
      if config.rl is not None:
        self._rl(variables, running, files)
      elif config.more_sft is not None:
        self._more_sft(samples, variables, running, files)

  def _rl(self, variables, running: roles.Rollouts, files) -> None:
    config = self._config
    self._view.begin('RL')
    optimizer = optimizer_lib.make(config.rl.optimizer)
    partition = optimizer_lib.describe(config.rl.optimizer, variables['params'])
    logging.info('rl: %s', partition)
    with CheckpointManager(self._workdir / 'rl', keep=2) as manager:
      learner = Learner(
        config.model,
        config.rl.learner,
        optimizer,
        train_step.init_state(variables, optimizer),
        sharding_lib.make(config.mesh),
      )
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

  def _more_sft(self, samples, variables, running: roles.Rollouts, files) -> None:
    config, more = self._config, self._config.more_sft
    self._view.begin('more SFT')
    continued = dataclasses.replace(
      config,
      seed=config.seed + 1,  # another order of the samples
      sft=dataclasses.replace(config.sft, loop=more.loop, optimizer=more.optimizer),
    )
    with CheckpointManager(self._workdir / 'more_sft', keep=1) as manager:
      variables = prepare.sft(
        continued, samples, variables, manager, self._metrics, files, 'more_sft'
      )
      running.scheduler.update_weights(jax.tree.map(jnp.copy, variables), 1)
      self._evaluate(AFTER_MORE_SFT, manager.latest_step(), running, greedy=True)

  def _evaluate(self, stage: str, step: int, running, greedy: bool = False) -> None:
    """Evaluates a phase's last weights on the development and held-out splits."""
    config, view = self._config, self._view
    view.begin(f'eval {stage}')
    parts = [('dev', config.dev_tasks, 1.0), ('held_out', config.eval_tasks, 1.0)]
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
        view.done(f'{split} {success:.3f}')


def _log_tokens(samples: list[forest.Sample]) -> None:
  lengths = [len(s.tokens) for s in samples]
  logging.info(
    '%d demonstrations, %.0f tokens on average, %d at most',
    len(lengths),
    sum(lengths) / len(lengths),
    max(lengths),
  )
