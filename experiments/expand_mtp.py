"""Expands the MTP modules of a pre-trained checkpoint by weight copy, and trains them.

python -m experiments.expand_mtp --config=configs/expand_mtp.py \
  --config.init_from=workdir/pretrain --workdir=workdir/expand_mtp
"""

from __future__ import annotations

import dataclasses
import functools

from experiments import common, pretrain
from m2jax.checkpoint import CheckpointError, initial, policy
from m2jax.data import documents
from m2jax.observe.metrics import MetricsWriter
from m2jax.sharding import MeshConfig
from m2jax.train import expand_mtp
from m2jax.train import pretrain as train_pretrain
from m2jax.train.loop import Run
from m2jax.train.workdir import WorkdirError, open_workdir


@dataclasses.dataclass(frozen=True)
class Config:
  """One run; model and tokenizer are the checkpoint's.

  A run may resume on another mesh.
  """

  seed: int
  init_from: str
  text: pretrain.TextConfig
  expand: expand_mtp.ExpandConfig
  mesh: MeshConfig = MeshConfig()


def main():
  config, workdir = common.build(Config, common.values()), common.workdir()
  if not config.init_from:
    raise common.BadInput('--config.init_from is missing: give the workdir of a run')
  common.start(config.mesh)
  process = common.join_processes()
  sharding = common.make_sharding(config.mesh)
  start = initial.load(config.init_from, sharding=sharding)
  corpus, held_out = pretrain.open_text(config.text)
  settings = dataclasses.replace(config, mesh=MeshConfig())  # the same on any mesh
  encode = pretrain.encoder(start.load_tokenizer())

  def sources(part):
    return pretrain.stage_sources(
      config.text, part.stages, corpus, encode, seed=config.seed, workdir=workdir
    )

  with common.leader_first() as leads:
    open_workdir(settings, workdir, common.FRESH.value, leads)
    if leads:
      (workdir / policy.TOKENIZER_FILE).write_bytes(start.tokenizer)
    frozen, joint = sources(config.expand.frozen), sources(config.expand.joint)
  held_out = documents.Encoded(held_out, encode)
  records = workdir if leads else workdir / f'process{process}'
  loops = {
    expand_mtp.FROZEN: config.expand.frozen.loop,
    expand_mtp.JOINT: config.expand.joint.loop,
  }
  with (
    MetricsWriter(records) as metrics,
    common.view('expand_mtp', loops, metrics, leads, held_out=True) as measures,
  ):
    model, state = expand_mtp.fit(
      config.expand,
      start.model,
      start.variables,
      expand_mtp.Data(
        frozen,
        joint,
        held_out,
      ),
      workdir,
      functools.partial(
        Run,
        metrics=metrics,
        host={'config': dataclasses.asdict(config)},
        files={policy.TOKENIZER_FILE: start.tokenizer},
      ),
      seed=config.seed,
      sharding=sharding,
    )
    measures()
    loss = train_pretrain.held_out(
      config.expand.joint, model, state.variables, held_out, sharding
    )
    metrics.supersede('held_out', -1)
    metrics.write('held_out', int(state.step), loss)
  print(
    f'{model.num_mtp_modules} MTP modules; held-out loss {loss["loss"]:.3f}, of the '
    f'modules {loss["mtp_loss"]:.3f} nats/token over {loss["tokens"]} tokens\n'
    f'checkpoint: {workdir / "pretrain"}'
  )


if __name__ == '__main__':
  common.run(main, CheckpointError, WorkdirError, distributed=True)
