"""A workload on a slice: compiles its programs and adds up the roofline."""

from __future__ import annotations

import dataclasses
import pathlib

from absl import logging

from m2jax import sharding as sharding_lib
from m2jax.plan import collectives, estimate, flops, hlo, programs
from m2jax.plan import compile as compile_lib
from m2jax.plan.topology import Topology
from m2jax.plan.workloads import JOBS, TRAINING, Placed, PlanConfig

_COUNTED = ('micro', 'prefill', 'decode')  # whose FLOPs are counted by hand
_MODEL = (*_COUNTED, 'push', 'leaf', 'pop')


def sharding(placed: Placed, topology: Topology) -> sharding_lib.Sharding:
  """The workload's mesh over the slice's devices.

  Raises:
    ValueError: the mesh has another number of devices.
  """
  wanted = placed.mesh.size
  if wanted != len(topology.devices):
    raise ValueError(
      f'mesh {placed.mesh.sizes} of workload {placed.name!r} has {wanted} devices; '
      f'{topology.name} has {len(topology.devices)}'
    )
  mesh = sharding_lib.make_mesh(placed.mesh, topology.devices)
  return sharding_lib.Sharding(mesh, sharding_lib.rules_of(placed.mesh))


def local_part(
  config: PlanConfig, placed: Placed, where: sharding_lib.Sharding
) -> flops.Local:
  """Sizes of one device's part of one pass."""
  load = placed.workload
  keys = load.context if load.kind in TRAINING else load.context + load.new_tokens
  return flops.local(config.model, where, placed.micro_rows, load.new_tokens, keys)


def check_gathers(name: str, module: hlo.Module, where: sharding_lib.Sharding) -> None:
  """A program whose mesh shards weights has to gather them.

  Raises:
    ValueError: it has no all-gather that this parser can see: every figure of its
      communication would be too small.
  """
  if not where.gathers:
    return
  if all(c.kind != 'all-gather' for c in collectives.find(module, where.mesh.size)):
    raise ValueError(
      f'{name}: mesh {dict(where.mesh.shape)} gathers weights, but no all-gather was '
      'found in the compiled program. The compiler writes collectives in a notation '
      'that m2jax.plan does not read: install the versions of constraints.txt'
    )


def make(
  config: PlanConfig,
  placed: Placed,
  topology: Topology,
  store: pathlib.Path | None = None,
) -> estimate.Plan:
  """Compiles a workload's programs for a slice and estimates them.

  Args:
    store: directory of compiled programs (see `compile.compile_program`).

  Raises:
    ValueError: the model does not divide over the mesh, has sliding windows, or a
      program that gathers weights has no all-gather.
    DoesNotCompile: a program does not compile.
  """
  if config.model.window is not None:
    raise ValueError(
      f'ModelConfig.window={config.model.window}: FLOPs are counted for full attention'
    )
  config = dataclasses.replace(config, model=placed.model(config.model))
  where = sharding(placed, topology)
  training = placed.workload.kind in TRAINING
  part = local_part(config, placed, where)
  sizes = config.model, part, topology.chip.mxu, training
  counted, core = flops.executed(*sizes), flops.core(*sizes)
  found, every = [], programs.make(config, placed, where)
  for program in every:
    logging.info('%s: compiling %s for %s', placed.name, program.name, topology.name)
    compiled = compile_lib.compile_program(
      program, config.compiler_options, store=store
    )
    logging.info('%s: %s took %.0f s', placed.name, program.name, compiled.seconds)
    if program.name in _MODEL:
      check_gathers(f'{placed.name}: {program.name}', compiled.module, where)
    by_hand = (counted, core) if program.name in _COUNTED else ({}, {})
    found.append(estimate.estimate(compiled, by_hand[0], topology, by_hand[1]))
  parameters, optimizer = programs.state_bytes(every)
  load = placed.workload
  return estimate.Plan(
    workload=placed.name,
    job=JOBS[load.kind],
    topology=topology.name,
    devices=len(topology.devices),
    mesh=dataclasses.asdict(placed.mesh),
    rows=load.rows,
    passes=placed.passes,
    tokens=load.rows * load.new_tokens,
    useful_flops=placed.passes * flops.useful(config.model, part, training),
    peak_flops=topology.chip.peak_flops,
    hbm_bytes=topology.chip.hbm_bytes,
    parameters_bytes=parameters,
    optimizer_bytes=optimizer,
    programs=tuple(found),
  )
