"""Child of test_resume: a whole run of the main job, small, that may be killed.

  python -m tests.forge.forge_worker WORKDIR

The run is the product's own; two methods are wrapped to write down, in
WORKDIR/witness.jsonl, what is to be compared over several lives: a digest of the train
state whenever it is saved and restored, and the items of every update. Each witness
line is also printed, so that a parent can choose the moment to kill.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
import time

import jax
import numpy as np

from configs import forge as forge_config
from experiments import common
from m2jax import platforms
from m2jax.forge import rl_loop, run
from m2jax.forge.config import ForgeConfig
from m2jax.forge.processes import lead
from m2jax.rl import learner
from tests.faults.witness import Writer

ITEMS, PER_STEP, MOST_PER_STEP, CHECKPOINT_EVERY = 91, 2, 3, 3


def config() -> ForgeConfig:
  """The smoke variant with a smaller model and a queue that ends."""
  c = forge_config.get_config('smoke')
  c.model.update(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16)
  c.model.update(rotary_dim=8, num_experts=4, expert_dim=16)
  c.eval_tasks = 2
  c.engine.update(
    slots=4,
    decode_rows=(4,),
    contexts=(384,),
    context_tokens=384,
    prefill_shapes=((1, 64), (4, 64)),
  )
  c.episodes.agent.max_tokens = 24
  c.sft.update(demonstrations=30, tokens_per_step=1024)
  c.sft.loop.update(steps=3, checkpoint_every=2)
  c.rl.update(
    steps=1000,
    seconds=0.0,
    max_items=ITEMS,
    groups_per_step=PER_STEP,
    group_size=2,
    capacity=6,
    checkpoint_every=CHECKPOINT_EVERY,
    refill_factor=MOST_PER_STEP / PER_STEP,
    dev_every=6,
    dev_tasks=2,
    patience=0,  # a policy that learns nothing would end the run
  )
  values = c.to_dict()
  return common.build(ForgeConfig, values)


def digest(state) -> str:
  """Of every bit of weights, router biases, optimizer and step, of this process."""
  found = hashlib.sha256()
  for leaf in jax.tree.leaves(state):
    for shard in leaf.addressable_shards:
      found.update(np.asarray(shard.data).tobytes())
  return found.hexdigest()[:16]


def instrument(workdir: pathlib.Path):
  """Wraps the product's methods; returns the function that writes a line."""
  witness = Writer(workdir)

  def resume(self, product=rl_loop.RlLoop.resume):
    product(self)
    state = self._learner.state
    scheduler, deadline_s = self._roles.scheduler, time.monotonic() + 60
    while (served := scheduler.stats().get('policy_version')) != int(state.step):
      if time.monotonic() > deadline_s:
        break
      time.sleep(0.01)  # the engine swaps weights between two calls
    witness('resumed', step=int(state.step), digest=digest(state), served=served)

  def save(self, step, product=rl_loop.RlLoop._save):
    witness('saved', step=step, digest=digest(self._learner.state))
    product(self, step)

  def witnessed(product):
    def update(self, credits_, passes):
      items = [g.credits[0].trajectory.item for g in credits_]
      useful = sum(not g.dropped for g in credits_)
      witness('update', step=self.version + 1, items=items, useful=useful)
      return product(self, credits_, passes)

    return update

  rl_loop.RlLoop.resume, rl_loop.RlLoop._save = resume, save
  for kind in (learner.Learner, lead.LeadLearner):
    kind.update = witnessed(kind.update)
  return witness


def main(workdir: pathlib.Path):
  platforms.own_only()
  witness = instrument(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  common.start(config().mesh)
  run.run(config(), workdir)
  witness('done')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
