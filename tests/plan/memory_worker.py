"""Compiles a small model's train step on 8 virtual CPU devices; prints its memory, and
compares the chunks' arguments with those of a learner.

Its own process: the number of devices is set before jax starts.
"""

from __future__ import annotations

import dataclasses
import json

import jax


def main():
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)
  from m2jax import config, platforms, sharding
  from m2jax.plan import compile as compile_lib
  from m2jax.plan import programs, workloads

  platforms.own_only()
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
      state=programs.state_bytes([program]),
      expected=programs.device_bytes(program.arguments),
      **dataclasses.asdict(compiled.memory),
    )
    print(json.dumps(found), flush=True)
  print(json.dumps(chunked(plan, placed, where)), flush=True)


def chunked(plan, placed, where):
  """Differences of planned arguments from those of `chunks.gradients` on a tree."""
  import numpy as np

  from m2jax import forest
  from m2jax.plan import programs
  from m2jax.rl import learner
  from m2jax.train import chunks
  from m2jax.train import step as train_step

  load = dataclasses.replace(placed.workload, chunk_tokens=16)
  placed = dataclasses.replace(placed, workload=load)
  planned = {p.name: p.arguments for p in programs.make(plan, placed, where)}
  cfg, passed = plan.model, {}
  objective = learner.Objective()
  parts = chunks.programs(cfg, objective, train_step.StepConfig(), where)

  def record(kind, result):
    def call(*arguments):
      passed[kind] = arguments
      return result(*arguments)

    return call

  parts = parts._replace(
    push=record('push', lambda variables, stack, *_: stack),
    leaf=record('leaf', lambda _, sums, stack, cotangents, *__: (sums, cotangents)),
    pop=record('pop', lambda _, sums, stack, cotangents, *__: (sums, cotangents)),
  )
  state = train_step.new_state(
    cfg, programs.optimizer_lib.make(plan.optimizer), jax.random.key(0), where
  )
  length = 50
  ids = np.zeros((length, cfg.num_layers, cfg.experts_per_token), np.int32)
  ones = np.ones(length - 1, np.float32)
  sample = forest.Sample(np.arange(length), 1, ones, ones, ones, experts=ids)
  buckets = forest.Buckets((16,), (load.context,), terms_per_token=1)
  chunks.gradients(parts, state.variables, forest.cut(forest.merge([sample]), buckets))
  differences = []
  for kind, arguments in passed.items():
    pairs = zip(
      jax.tree.leaves_with_path(planned[kind]),
      jax.tree.leaves_with_path(arguments),
      strict=True,
    )
    for (path, want), (_, got) in pairs:
      got = got if isinstance(got, jax.Array) else jax.numpy.int32(got)
      same = (want.shape, want.dtype) == (got.shape, got.dtype)
      if want.shape:
        same &= want.sharding.is_equivalent_to(got.sharding, len(want.shape))
      if not same:
        name = jax.tree_util.keystr(path)
        differences.append(f'{kind}{name}: {want} is not {got.aval} {got.sharding}')
  return dict(name='chunks', kinds=sorted(passed), differences=differences)


if __name__ == '__main__':
  main()
