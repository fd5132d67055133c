"""Compiles the full-width model, one layer deep, for a TPU slice; prints the plan.

With 'prefill' or 'decode' in place of a slice: a call of the rollout engine, two layers
deep, for four chips.

Its own process: libtpu loads once, and takes its memory with it.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax

# On every kind 8 devices share the experts, so that none gathers all of them.
SLICES = {'v5p:4x4x4': 64, 'v6e:16x16': 256, 'tpu7x:4x4x4': 128}
CONTEXT = 1024
# rows, context, new tokens; a layer's keys are more than its experts
SERVED = {'prefill': (32, 131_072, 64), 'decode': (128, 32_768, 0)}


def main(name):
  jax.config.update('jax_platforms', 'cpu')
  from m2jax import config, sharding
  from m2jax.plan import plan, render, topology, workloads

  if name in SERVED:
    rows, context, tokens = SERVED[name]
    mesh = sharding.MeshConfig(tensor=4, rules='serve')
    model = dataclasses.replace(config.m2(), num_layers=2, num_mtp_modules=0)
    load = workloads.Workload(name, rows, context, tokens, meshes=(mesh,))
    one = workloads.PlanConfig(model, {name: load})
    made = plan.make(one, workloads.place(name, load, 4), topology.load('v5p:2x2x1'))
    print(json.dumps(render.as_json(made)))
    return
  devices = SLICES[name]
  mesh = sharding.MeshConfig(fsdp=devices // 8, expert=8)
  model = dataclasses.replace(config.m2(), num_layers=1, num_mtp_modules=0)
  load = workloads.Workload('pretrain', devices, CONTEXT, meshes=(mesh,))
  one = workloads.PlanConfig(model, {'step': load})
  placed = workloads.place('step', load, devices)
  made = plan.make(one, placed, topology.load(name))
  print(json.dumps(render.as_json(made)))


if __name__ == '__main__':
  main(*sys.argv[1:])
