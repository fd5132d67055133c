"""One process of a pre-training run on a mesh; prints what it read and saw as JSON.

python -m tests.train.hosts_worker JSON, with the fields of `main`.
"""

import json
import os
import sys


class Watched(list):
  """Documents, and which of them were read."""

  def __init__(self, items):
    super().__init__(items)
    self.read = set()

  def __getitem__(self, index):
    self.read.add(index)
    return super().__getitem__(index)


def main(
  *,
  directory: str,
  mesh: dict[str, int],
  steps: int,
  devices: int,
  process: int = 0,
  processes: int = 1,
  coordinator: str = '',
  second_mesh: dict[str, int] | None = None,
):
  import jax

  from m2jax import platforms
  from m2jax import sharding as sharding_lib

  platforms.own_only()
  jax.config.update('jax_num_cpu_devices', devices)
  if processes > 1:
    sharding_lib.join(coordinator, processes, process)

  import numpy as np

  from m2jax.checkpoint import CheckpointManager
  from m2jax.observe import metrics as metrics_lib
  from m2jax.optim import AdamConfig, OptimizerConfig
  from m2jax.train import hosts, pretrain
  from m2jax.train.loop import LoopConfig, Run
  from m2jax.train.stages import PretrainConfig
  from m2jax.train.step import StepConfig
  from tests.sharding import small

  cfg = small.config(dtype='float32', param_dtype='float32')
  rng = np.random.default_rng(0)
  sizes = rng.integers(5, 60, 30)
  source = Watched([rng.integers(1, cfg.vocab_size, n) for n in sizes])
  config = PretrainConfig(
    # two batches, then longer rows
    stages=((16, 8, 2 * 128), dict(context=32, rows=4, mesh=second_mesh)),
    held_out_batches=1,
    loop=LoopConfig(steps=steps, checkpoint_every=100, log_every=1),
    step=StepConfig(micro_rows=4, bias_update_rate=1e-2),
    optimizer=OptimizerConfig(adam=AdamConfig(learning_rate=1e-2)),
  )
  sharding = sharding_lib.make(sharding_lib.MeshConfig(**mesh))
  workdir = os.path.join(directory, f'process{process}')
  with (
    CheckpointManager(os.path.join(directory, 'pretrain')) as manager,
    metrics_lib.MetricsWriter(workdir, use_tensorboard=False) as metrics,
  ):
    pretrain.fit(
      config,
      cfg,
      [source, source],
      Run('pretrain', manager, metrics),
      seed=1,
      sharding=sharding,
    )
    data = manager.read_host()[0]['data']
  records = [r for r in metrics_lib.read(workdir) if r['lineage'] == metrics.lineage]
  print(
    json.dumps(
      {
        'host': [hosts.find(sharding).index, hosts.find(sharding).count],
        'read': sorted(map(int, source.read)),
        'losses': [r['loss'] for r in records],
        'consumed': [r['consumed_tokens'] for r in records],
        'data': data,
      }
    )
  )


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))
