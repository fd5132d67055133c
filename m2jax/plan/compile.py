"""Compiles a program ahead of time: its memory and its HLO."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from m2jax.plan import hlo
from m2jax.plan.programs import Program, device_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one device's HBM while a program runs.

  Attributes:
    arguments: the program's, with the padding of tiles.
    padding: of the arguments.
    outputs: not aliased to an argument.
    saved: activations saved for the backward pass.
    temporaries: all other allocations of the program.
    resident: arrays of other programs that are in HBM at the same time.
    code: the program itself.
  """

  arguments: int
  padding: int
  outputs: int
  saved: int
  temporaries: int
  resident: int
  code: int

  @property
  def total(self) -> int:
    """All of them; `padding` is part of `arguments`."""
    parts = dataclasses.asdict(self)
    return sum(parts.values()) - self.padding


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled program.

  Attributes:
    name, runs: the program's.
    module: its HLO.
    devices: in the order in which the HLO counts them.
    seconds: tracing, lowering and compiling.
  """

  name: str
  runs: int
  memory: Memory
  module: hlo.Module
  devices: tuple[jax.Device, ...]
  seconds: float


def compile_program(
  program: Program, options: Mapping[str, Any], platform: str = 'tpu'
) -> Compiled:
  """Compiles one program for the devices of its arguments' shardings.

  Raises:
    ValueError: the compiler's error, with its message; for a program that does not fit
      HBM this is its account of memory.
  """
  start = time.monotonic()
  traced = program.jitted.trace(*program.arguments)
  lowered = traced.lower(lowering_platforms=(platform,))
  try:
    compiled = lowered.compile(compiler_options=dict(options))
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(f'{program.name} does not compile: {error}') from error
  stats = compiled.memory_analysis()
  module = hlo.parse(compiled.as_text())
  saved = int(saved_bytes(module))
  arguments = device_bytes(program.arguments)
  memory = Memory(
    arguments=stats.argument_size_in_bytes,
    # would be negative where arguments are not used
    padding=max(stats.argument_size_in_bytes - arguments, 0),
    outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
    saved=saved,
    temporaries=stats.temp_size_in_bytes - saved,
    resident=device_bytes(program.resident),
    code=stats.generated_code_size_in_bytes,
  )
  return Compiled(
    program.name,
    program.runs,
    memory,
    module,
    tuple(mesh_devices(program)),
    time.monotonic() - start,
  )


def mesh_devices(program: Program) -> Sequence[jax.Device]:
  """The devices of a program's arguments, in the order of their mesh."""
  place = jax.tree.leaves(program.arguments)[0].sharding
  return list(place.mesh.devices.flat)


def saved_bytes(module: hlo.Module) -> float:
  """Bytes that the forward loop over layers saves for the backward pass.

  These are the arrays of its state that have one entry an iteration and are written.
  """
  total = 0.0
  for execution in hlo.walk(module):
    loop = execution.instruction
    if loop.opcode != 'while' or execution.where or 'transpose(' in loop.op_name:
      continue
    iterations = hlo.trip_count(module, loop)
    (body,) = loop.called('body')
    lines = {i.name: i for i in module.computations[body]}
    root = next(i for i in lines.values() if i.is_root)
    for index, (array, name) in enumerate(
      zip(loop.arrays, root.operands, strict=False)
    ):
      if not array.dims or array.dims[0] != iterations or iterations < 2 or array.space:
        continue
      source = lines.get(name)
      same = (
        source is not None
        and source.opcode == 'get-tuple-element'
        and f'index={index},' in source.attributes + ','
      )
      if not same:
        total += array.padded_bytes
  return total
