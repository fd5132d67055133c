"""Compiles a small model's train step on 8 virtual CPU devices; prints its memory.

Its own process: the number of devices is set before jax starts.
"""

from __future__ import annotations

import dataclasses
import json

import jax


def main():
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)
  from m2jax import config, sharding
  from m2jax.plan import compile as compile_lib
  from m2jax.plan import programs, workloads

  mesh = sharding.MeshConfig(data=2, fsdp=2, expert=2)
  load = workloads.Workload('rl', 16, 64, terms=48, meshes=(mesh,), passes=(2,))
  model = dataclasses.replace(
    config.tiny(), num_mtp_modules=0, unroll_layers=False, remat='layer'
  )
  plan = workloads.PlanConfig(model, {'small': load})
  placed = workloads.place('small', load, 8)
  where = sharding.make(mesh)
  for program in programs.make(plan, placed, where):
    compiled = compile_lib.compile_program(program, {}, platform='cpu')
    found = dict(
      name=program.name,
      runs=program.runs,
      state=programs.state_bytes(program.arguments[0]),
      expected=programs.device_bytes(program.arguments),
      **dataclasses.asdict(compiled.memory),
    )
    print(json.dumps(found), flush=True)


if __name__ == '__main__':
  main()
