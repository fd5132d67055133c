"""One process of a training run: trains some steps, saves, prints its losses as JSON.

python -m tests.sharding.distributed_worker JSON, with the fields of `main`.
"""

import json
import sys


def main(
  *,
  directory: str,
  mesh: dict[str, int],
  steps: int,
  devices: int,
  process: int = 0,
  processes: int = 1,
  coordinator: str = '',
):
  import jax

  from m2jax import platforms
  from m2jax import sharding as sharding_lib

  platforms.own_only()
  jax.config.update('jax_num_cpu_devices', devices)
  if processes > 1:
    sharding_lib.join(coordinator, processes, process)
  assert len(jax.devices()) == devices * processes

  from m2jax import forest
  from m2jax.checkpoint import CheckpointManager
  from m2jax.optim import optimizer as optimizer_lib
  from m2jax.train import hosts as hosts_lib
  from m2jax.train import step as train_step
  from tests.sharding import small

  sharding = sharding_lib.make(sharding_lib.MeshConfig(**mesh))
  optimizer = optimizer_lib.make(
    optimizer_lib.OptimizerConfig(adam=optimizer_lib.AdamConfig(learning_rate=1e-2))
  )
  config = train_step.StepConfig(micro_rows=4)
  cfg = small.config(dtype='float32', param_dtype='float32')
  hosts = hosts_lib.find(sharding)
  step = train_step.make_step(cfg, optimizer, train_step.nll, config, sharding)
  state = train_step.new_state(cfg, optimizer, jax.random.key(0), sharding)
  losses = []
  with CheckpointManager(directory) as manager:
    if manager.latest_step() is not None:
      state = manager.restore(like=state).state
    for number in range(int(state.step), steps):
      batch = small.batch(number, rows=8)
      part = len(batch.tokens) // hosts.count
      mine = slice(hosts.index * part, (hosts.index + 1) * part)
      batch = forest.select(batch, mine)
      state, metrics = step(state, batch)
      losses.append(train_step.fetch(metrics)['loss'])
    manager.save(int(state.step), state, {'process': process})
  print(json.dumps(losses))


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))
