"""The main job from start to report, phase after phase; resumes where it stopped."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import logging

from m2jax import forest
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forge import prepare, reporting, rl_loop, roles
from m2jax.forge.config import ForgeConfig
from m2jax.observe import metrics as metrics_lib
from m2jax.observe.terminal import ForgeView
from m2jax.optim import optimizer as optimizer_lib
from m2jax.pool import data_pool
from m2jax.rl import learner
from m2jax.train import step as train_step
from m2jax.train.workdir import open_workdir

UNTRAINED = -1  # policy version of random weights; SFT's is 0, RL counts on from there
STAGES = ('before SFT', 'after SFT', 'after RL')


def run(config: ForgeConfig, workdir: Path, fresh: bool = False) -> list:
  """Runs or resumes the job; returns the held-out evaluations in order of stage."""
  open_workdir(config, workdir, fresh)
  seconds = {
    'demonstrations': 0.015 * config.sft.demonstrations,
    'eval before SFT': 0.05 * config.eval_tasks,
    'SFT': config.sft.loop.seconds or 0.2 * config.sft.loop.steps,
    'eval after SFT': 0.05 * config.eval_tasks,
  }
  if config.rl is not None:
    seconds |= {
      'RL': config.rl.seconds or 4.0 * config.rl.steps,
      'eval after RL': 0.05 * config.eval_tasks,
    }
  with (
    metrics_lib.MetricsWriter(workdir) as metrics,
    ForgeView(seconds) as view,
    data_pool.DataPool(f'sqlite:///{workdir.absolute()}/pool.db') as pool,
  ):
    for record in metrics_lib.read(workdir):
      view.on_record(record)
    metrics.add_listener(view.on_record)
    _phases(config, workdir, metrics, view, pool)
    metrics.flush()
    evaluations = reporting.write(config, workdir, pool)
  return evaluations


def _phases(config: ForgeConfig, workdir: Path, metrics, view: ForgeView, pool) -> None:
  view.begin('demonstrations')
  demos = prepare.make_demonstrations(
    config, workdir / 'demonstrations.jsonl', view.set_progress
  )
  tok = prepare.make_tokenizer(config, demos, workdir / 'tokenizer.json')
  files = {'tokenizer.json': (workdir / 'tokenizer.json').read_bytes()}
  samples = prepare.encode(config, tok, demos)
  successes = sum(demo.success for _, demo in demos)
  view.done(f'teacher {successes / len(demos):.2f}')
  _log_tokens(samples)

  finished = {
    record['stage']
    for record in metrics_lib.read(workdir, 'eval')
    if record['temperature'] == 0 and record['family'] == 'all'
  }
  if (STAGES[1] if config.rl is None else STAGES[2]) in finished:
    return

  def evaluate(stage: str, step: int, running: roles.Rollouts):
    view.begin(f'eval {stage}')
    if stage not in finished:
      started = time.monotonic()
      success = roles.evaluate(
        config, running, pool, metrics, stage, step, view.set_progress
      )
      logging.info('%s: %.3f in %.0f s', stage, success, time.monotonic() - started)
      view.done(f'{success:.3f}')

  with CheckpointManager(workdir / 'sft', keep=1) as sft_manager:
    variables = train_step.init_variables(config.model, jax.random.key(config.seed))
    with roles.rollouts(config, variables, tok, pool, UNTRAINED) as running:
      if sft_manager.latest_step() is None:
        evaluate(STAGES[0], 0, running)
      view.begin('SFT')
      variables = prepare.sft(config, samples, sft_manager, metrics, files)
      running.scheduler.update_weights(jax.tree.map(jnp.copy, variables), 0)
      steps = sft_manager.latest_step()
      evaluate(STAGES[1], steps, running)
      if config.rl is None:
        return
      view.begin('RL')
      optimizer = optimizer_lib.make(config.rl.optimizer)
      with CheckpointManager(workdir / 'rl', keep=2) as manager:
        the_learner = learner.Learner(
          config.model,
          config.rl.learner,
          optimizer,
          train_step.init_state(variables, optimizer),
        )
        with rl_loop.RlLoop(
          config, running, the_learner, pool, manager, metrics, files, view
        ) as rl:
          rl.resume()
          rl.run()
      evaluate(STAGES[2], the_learner.version, running)


def _log_tokens(samples: list[forest.Sample]) -> None:
  lengths = [len(s.tokens) for s in samples]
  logging.info(
    '%d demonstrations, %.0f tokens on average, %d at most',
    len(lengths),
    sum(lengths) / len(lengths),
    max(lengths),
  )
