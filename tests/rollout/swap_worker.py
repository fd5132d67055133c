"""New weights from a learner's mesh to an engine's, on 8 virtual devices; prints JSON.

python -m tests.rollout.swap_worker
"""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np

from m2jax import platforms, sharding
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from tests import quick
from tests.rollout import mesh_worker

CONFIG = dataclasses.replace(mesh_worker.CONFIG, context_tokens=96, contexts=(96,))


def request(tokens, count):
  return GenerateRequest(tuple(tokens), SamplingParams(count, temperature=0.0))


def generate(scheduler, count=8):
  handles = [scheduler.submit(request(range(i, 2 * i + 3), count)) for i in range(1, 4)]
  found = [handle.future.result(120) for handle in handles]
  tokens = [result.tokens.tolist() for result in found]
  return tokens, np.concatenate([result.logprobs for result in found])


class Counting:
  """Counts decode calls while the parts of new weights are placed."""

  def __init__(self, engine):
    self._engine, self.placing, self.calls = engine, False, 0

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def load_parts(self, params, part_bytes):
    self.placing = True
    yield from self._engine.load_parts(params, part_bytes)
    self.placing = False

  def generate_many(self, *args):
    self.calls += self.placing
    return self._engine.generate_many(*args)


def compare(placed, want):
  """(names of leaves that differ on a device, number of shards)."""
  differing, shards = [], 0
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(placed), jax.tree.leaves(want), strict=True
  )
  for (path, leaf), whole in pairs:
    whole = np.asarray(whole)
    for shard in leaf.addressable_shards:
      shards += 1
      if np.asarray(shard.data).tobytes() != whole[shard.index].tobytes():
        differing.append(jax.tree_util.keystr(path))
  return sorted(set(differing)), shards


def main():
  platforms.own_only()
  jax.config.update('jax_num_cpu_devices', 8)
  cfg = mesh_worker.model(mesh_worker.Case({}))
  first, second = (quick.variables(cfg, i, noise=0.1, bias=0.1) for i in range(2))
  learner = sharding.make(sharding.MeshConfig(fsdp=4, tensor=2))
  specs = sharding.param_specs(cfg, learner.rules)
  mesh = sharding.make(sharding.MeshConfig(data=2, expert=2, tensor=2))
  engine = Counting(mesh_worker.make_engine(cfg, CONFIG, mesh))
  config = SchedulerConfig(decode_steps=4, weights_part_bytes=1 << 14)
  scheduler = Scheduler(engine, learner.place(first, specs), 0, config)
  scheduler.start(warmup=False)
  generate(scheduler)  # compiles
  placed, updates = learner.place(second, specs), iter([1])

  def update(tokens):  # with the first tokens
    for version in updates:
      scheduler.update_weights(placed, version)

  handle = scheduler.submit(request([5, 6], 90), update)
  versions = handle.future.result(120).versions.tolist()
  tokens, logprobs = generate(scheduler)
  pause_s = scheduler.stats()['update_pause_s']
  scheduler.stop()
  differing, shards = compare(scheduler._batcher.variables, second)

  alone = Scheduler(Engine(cfg, CONFIG), second, 0, config).start(warmup=False)
  want_tokens, want_logprobs = generate(alone)
  alone.stop()
  result = {
    'differing': differing,
    'shards': shards,
    'in_flight': len(set(versions)) == 2,
    'sorted': versions == sorted(versions),
    'decode_calls_while_placing': engine.calls,
    'pause_s': pause_s,
    'tokens_equal': tokens == want_tokens,
    'worst_logprob': float(np.max(np.abs(logprobs - want_logprobs))),
  }
  print(json.dumps(result))


if __name__ == '__main__':
  main()
