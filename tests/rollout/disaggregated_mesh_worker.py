"""Prefill on one mesh, decoding on another one of other devices; prints a JSON line.

python -m tests.rollout.disaggregated_mesh_worker
"""

from __future__ import annotations

import json

import jax
import numpy as np

from m2jax import platforms, sharding
from m2jax.rollout.disaggregation.decode_engine import Disaggregated
from m2jax.rollout.disaggregation.handover import HandoverConfig
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from tests import quick
from tests.rollout import mesh_worker

CONFIG = SchedulerConfig(decode_steps=4)
HOW = HandoverConfig(local_tokens=0, part_pages=2)


def served(scheduler: Scheduler) -> list:
  handles = [scheduler.submit(job.request) for job in mesh_worker.jobs()]
  results = [handle.future.result(120) for handle in handles]
  scheduler.stop()
  return results


def main() -> None:
  platforms.own_only()
  jax.config.update('jax_num_cpu_devices', 8)
  devices = jax.devices()
  model = mesh_worker.model(mesh_worker.Case({}))
  variables = quick.variables(model, 0, noise=0.1, bias=0.1)
  engine = lambda where: mesh_worker.make_engine(model, mesh_worker.CONFIG, where)
  one = Scheduler(engine(sharding.ONE_DEVICE), variables, config=CONFIG)
  want = served(one.start())
  prefill = engine(sharding.make(sharding.MeshConfig(tensor=2), devices[:2]))
  mesh = sharding.MeshConfig(data=2, expert=2)
  decode = engine(sharding.make(mesh, devices[4:]))
  source = PrefillScheduler(prefill, variables, part_pages=HOW.part_pages)
  front = Disaggregated(decode, variables, source, config=CONFIG, how=HOW).start()
  compiled = prefill.compilations(), decode.compilations()
  got = served(front)
  equal = lambda name: all(
    np.array_equal(getattr(a, name), getattr(b, name))
    for a, b in zip(want, got, strict=True)
  )
  worst = max(
    float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(want, got, strict=True)
  )
  found = {name: equal(name) for name in ('tokens', 'versions', 'experts')}
  found |= dict(worst=worst, stats=front.stats())
  found['compiled'] = compiled != (prefill.compilations(), decode.compilations())
  print(json.dumps(found))


if __name__ == '__main__':
  main()
