"""One process of an RL run whose rollouts are recorded; its weights are to be compared.

  python -m tests.forge.learn_worker JSON, with the fields of `main`

Loop, queue, pool, checkpoints, commands and learner are the product's. The groups of
item i are always the same, and the queue is strict, so that every run trains the same
groups in the same order. What process 0 trains is written, one line an update, to
DIRECTORY/witness.jsonl and standard output.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import sys

import jax

from m2jax import platforms
from m2jax import sharding as sharding_lib

HEARTBEAT_S = 10
PER_STEP, CHECKPOINT_EVERY = 2, 2


class Runner:
  """Groups that end at once, with recorded completions."""

  def __init__(self, pool, family: str):
    from tests.rl import mesh_worker

    self._pool, self._family = pool, family
    self._recorded = mesh_worker.Pool(True)

  def group(self, spec, count, *, item, prefix, on_end, **_):
    del spec
    recorded = self._recorded.group(item % 3)
    while len(recorded) < count:
      failed = dataclasses.replace(
        recorded[0][0], rank=len(recorded), end_reason='infrastructure'
      )
      recorded.append((failed, []))
    ended = []
    for end, turns in recorded:
      session = f'{prefix}-{end.rank}'
      for turn in turns:
        self._pool.add_completion(
          dataclasses.replace(turn, id=f'{session}/{turn.turn}', session=session)
        )
      # which trajectory succeeds depends on the item
      success = float((end.rank + item // 3) % 2)
      end = dataclasses.replace(
        end, session=session, item=item, family=self._family, success=success
      )
      on_end(end)
      ended.append(end)
    future = concurrent.futures.Future()
    future.set_result(ended)
    return future


class Engine:
  """Takes weights, which have to be whole and on one device of this process."""

  alive = True

  def update_weights(self, variables, version):
    for leaf in jax.tree.leaves(variables):
      assert leaf.sharding.device_set == {jax.local_devices()[0]}, version

  def stats(self):
    return dict.fromkeys(('tokens_per_s', 'queue_length', 'active_slots'), 0)


class Gateway:
  def counters(self):
    return {}


def config(items: int, chunks: bool):
  """Groups in rows, or two of three in chunks."""
  from m2jax import forest
  from m2jax.rl import learner, rewards
  from m2jax.train import step as train_step
  from tests.forge import forge_worker
  from tests.sharding import small

  base = forge_worker.config()
  tokens = 16 if chunks else 64
  stack = 32 if chunks else 64
  of_learner = learner.LearnerConfig(
    row_tokens=tokens,
    row_terms=tokens,
    buckets=forest.Buckets((8,), (stack,), terms_per_token=2),
    reward=rewards.RewardConfig(alpha=0.0, beta=0.0),
    step=train_step.StepConfig(micro_rows=8, detach_mtp=True, bias_update_rate=1e-2),
  )
  rl = dataclasses.replace(
    base.rl,
    learner=of_learner,
    optimizer=small.optimizer('adam'),
    max_items=items,
    groups_per_step=PER_STEP,
    group_size=4,
    checkpoint_every=CHECKPOINT_EVERY,
    capacity=4,
    window=1,
    refill_factor=1.0,
    dev_every=0,
  )
  return dataclasses.replace(base, model=small.config(), rl=rl)


def main(
  *,
  directory: str,
  mesh: dict[str, int],
  devices: int,
  items: int,
  chunks: bool = True,
  process: int = 0,
  processes: int = 1,
  coordinator: str = '',
):
  platforms.own_only()
  jax.config.update('jax_enable_x64', True)
  jax.config.update('jax_num_cpu_devices', devices)
  if processes > 1:
    sharding_lib.join(
      coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_S
    )

  from m2jax import tasks
  from m2jax.forge import prepare, rl_loop
  from m2jax.forge.processes import follow, lead
  from m2jax.forge.processes.commands import Commands
  from m2jax.forge.roles import in_process
  from m2jax.observe import metrics as metrics_lib
  from m2jax.pool import data_pool
  from tests import quick
  from tests.faults import witness as witness_lib

  workdir = pathlib.Path(directory)
  workdir.mkdir(exist_ok=True)
  settings = config(items, chunks)
  sharding = sharding_lib.make(sharding_lib.MeshConfig(**mesh))
  variables = quick.variables(settings.model, 0, noise=0.1, bias=0.1)
  commands = Commands()
  if process:
    learner = prepare.learner(settings, variables, sharding)
    with commands.following():
      follow.follow_rl(learner, settings, workdir, commands)
    print('{}')
    return

  of_learner, of_manager = lead.kinds(commands, workdir)
  learner = prepare.learner(settings, variables, sharding, make=of_learner)
  witness = witness_lib.Writer(workdir)
  with (
    commands.leading(),
    metrics_lib.MetricsWriter(workdir, use_tensorboard=False) as metrics,
    data_pool.DataPool(f'sqlite:///{workdir}/pool.db') as pool,
    of_manager(workdir / 'rl', keep=2) as manager,
  ):
    runner = Runner(pool, next(iter(tasks.families(settings.tasks))))
    running = in_process.Rollouts(settings, pool, Engine(), Gateway(), runner)
    train = learner.update

    def update(credits_, passes):
      taken = [g.credits[0].trajectory.item for g in credits_]
      witness('update', step=learner.version + 1, items=taken)
      return train(credits_, passes)

    learner.update = update
    loop = rl_loop.RlLoop(settings, running, learner, manager, metrics, files={})
    with loop as rl:
      rl.resume()
      witness('resumed', step=learner.version)
      rl.run()
    witness('done')


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))
