"""Supervised fine-tuning on chats, from random or given weights.

  python -m experiments.sft --config=configs/sft.py --workdir=workdir/sft \
    --config.demonstrations=workdir/forge/demonstrations.jsonl
"""

from __future__ import annotations

import dataclasses
import os

import jax

from experiments import common
from m2jax import checks, sharding
from m2jax.checkpoint import CheckpointError, CheckpointManager, initial, policy
from m2jax.config import ModelConfig
from m2jax.data import chats
from m2jax.observe import metrics as metrics_lib
from m2jax.optim import gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.text import tokenizer
from m2jax.train import sft
from m2jax.train import step as train_step
from m2jax.train.loop import Run
from m2jax.train.workdir import WorkdirError, keep_tokenizer, open_workdir


@dataclasses.dataclass(frozen=True)
class Config:
  """One run; with `init_from` model and tokenizer are those of the weights.

  `system` and `tools` are for chats without their own; see `data.chats`. A share of
  `held_out` of the chats is not trained, for the loss that is printed at the end. A run
  may resume on another mesh.
  """

  seed: int
  demonstrations: str
  system: str | None
  tools: tuple[dict, ...]
  init_from: str
  model: ModelConfig
  tokenizer: str
  sft: sft.SftConfig
  held_out: float = 0.0
  mesh: sharding.MeshConfig = sharding.MeshConfig()

  def __post_init__(self):
    checks.require(self, 0 <= self.held_out <= 0.5, 'held_out', 'between 0 and 0.5')
    gnmr.check(self.sft.optimizer.gnmr, self.model)


def main():
  config, workdir = common.build(Config, common.values()), common.workdir()
  common.start(config.mesh)
  process = common.join_processes()
  mesh = common.make_sharding(config.mesh)
  if not os.path.isfile(config.demonstrations):
    raise common.BadInput(
      f'--config.demonstrations={config.demonstrations}: no such file; give JSON lines '
      'of chats, such as demonstrations.jsonl in the workdir of experiments.forge'
    )
  found = chats.read(config.demonstrations, system=config.system, tools=config.tools)
  own = workdir / 'sft'
  start = own if common.resumes(own) else config.init_from
  source = initial.load(start, config.model, mesh) if config.init_from else None
  model = source.model if source else config.model
  anywhere = dataclasses.replace(config, mesh=sharding.MeshConfig())

  def make_tokenizer():
    if source:
      return source.load_tokenizer()
    if config.tokenizer:
      return tokenizer.load(config.tokenizer)
    return tokenizer.train([chat.text() for chat in found], model.vocab_size)

  path = workdir / policy.TOKENIZER_FILE
  with common.leader_first() as leads:
    open_workdir(anywhere, workdir, common.FRESH.value, leads)
    tok = keep_tokenizer(path, make_tokenizer, model.vocab_size)
  room = min(config.sft.row_tokens, config.sft.tokens_per_step, model.max_positions)
  groups = chats.encode(found, tok, room, config.sft.templates)
  held_out = []
  if config.held_out and len(groups) > 1:
    every = round(1 / config.held_out)
    held_out, groups = groups[::every], [g for i, g in enumerate(groups) if i % every]
  every = config.sft.loop.keep_every_steps
  checkpoints = CheckpointManager(own, keep_every_steps=every)
  records = workdir if leads else workdir / f'process{process}'
  loops, measured = {'sft': config.sft.loop}, ''
  with (
    checkpoints as manager,
    metrics_lib.MetricsWriter(records) as metrics,
    common.view('sft', loops, metrics, leads, held_out=bool(held_out)) as measures,
  ):
    if source:
      variables = source.variables
    else:
      variables = train_step.init_variables(model, jax.random.key(config.seed))
      initialize = optimizer_lib.initializer(config.sft.optimizer, model)
      variables['params'] = initialize(variables['params'])
    state = sft.fit(
      config.sft,
      model,
      variables,
      groups,
      Run(
        'sft',
        manager,
        metrics,
        files={policy.TOKENIZER_FILE: path.read_bytes()},
        scalars=chats.trained_by_role(groups, tok),
      ),
      seed=config.seed,
      sharding=mesh,
    )
    if held_out:
      measures()
      loss = sft.held_out(config.sft, model, state.variables, held_out, mesh)
      metrics.supersede('held_out', -1)
      metrics.write('held_out', int(state.step), loss)
      measured = f'; held-out loss {loss["loss"]:.3f} over {loss["tokens"]} tokens'
  loss = metrics_lib.read(records, 'sft')[-1]['loss']
  print(
    f'loss {loss:.3f} nats/token after {int(state.step)} steps on {len(groups)} chats'
    f'{measured}\ncheckpoint: {own}'
  )


if __name__ == '__main__':
  common.run(main, CheckpointError, WorkdirError, distributed=True)
