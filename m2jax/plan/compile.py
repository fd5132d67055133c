"""Compiles a program ahead of time: its memory and its HLO.

Both can be stored: a program is recompiled only if it changed, so other code can
recompute figures in seconds.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from m2jax import platforms
from m2jax.plan import hlo
from m2jax.plan.programs import Program, device_bytes
from m2jax.plan.workloads import SERVING


class DoesNotCompile(ValueError):
  """The compiler rejects a program, for example for its memory; says why."""


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one device's HBM while a program runs.

  Attributes:
    arguments: the program's, with the padding of tiles.
    padding: padding of the arguments.
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
    devices: the devices in the order in which the HLO counts them.
    seconds: time to compile.
  """

  name: str
  runs: int
  memory: Memory
  module: hlo.Module
  devices: tuple[jax.Device, ...]
  seconds: float


_SIZES = ('argument', 'output', 'alias', 'temp', 'generated_code')


def compile_program(
  program: Program,
  options: Mapping[str, Any],
  platform: str = 'tpu',
  store: pathlib.Path | None = None,
) -> Compiled:
  """Compiles one program for the devices of its arguments' shardings.

  Args:
    options: XLA's.
    store: directory of compiled programs; one that is there is not compiled again.

  Raises:
    ValueError: the compiler's error, with its message; for a program that does not fit
      HBM this is its account of memory.
  """
  with platforms.any_platform():
    traced = program.jitted.trace(*program.arguments)
    lowered = traced.lower(lowering_platforms=(platform,))
  devices = tuple(mesh_devices(program))
  path = store and store / f'{_key(lowered, options, devices)}.json.gz'
  if path and path.exists():
    found = json.loads(gzip.decompress(path.read_bytes()))
  else:
    found = _compile(program.name, lowered, options)
    if path:
      store.mkdir(parents=True, exist_ok=True)
      path.write_bytes(gzip.compress(json.dumps(found).encode(), 1))
  sizes = found['sizes']
  module = hlo.parse(found['text'])
  # a serving loop over layers carries the cache, which is written, too
  saved = 0 if program.name in SERVING else int(saved_bytes(module))
  arguments = device_bytes(program.arguments)
  memory = Memory(
    arguments=sizes['argument'],
    # would be negative where arguments are not used
    padding=max(sizes['argument'] - arguments, 0),
    outputs=sizes['output'] - sizes['alias'],
    saved=saved,
    temporaries=sizes['temp'] - saved,
    resident=device_bytes(program.resident),
    code=sizes['generated_code'],
  )
  return Compiled(program.name, program.runs, memory, module, devices, found['seconds'])


def _compile(name: str, lowered, options: Mapping[str, Any]) -> dict[str, Any]:
  start = time.monotonic()
  try:
    compiled = lowered.compile(compiler_options=dict(options))
  except jax.errors.JaxRuntimeError as error:
    raise DoesNotCompile(f'{name} does not compile: {error}') from error
  stats = compiled.memory_analysis()
  return dict(
    text=compiled.as_text(),
    sizes={size: getattr(stats, f'{size}_size_in_bytes') for size in _SIZES},
    seconds=time.monotonic() - start,
  )


def _key(lowered, options: Mapping[str, Any], devices: Sequence[jax.Device]) -> str:
  """Hash of everything that a compiled program depends on."""
  places = [(d.id, getattr(d, 'coords', None)) for d in devices]
  compiler = next(
    (d.version for d in importlib.metadata.distributions(name='libtpu')), None
  )
  about = jax.__version__, compiler, devices[0].device_kind, places
  text = repr((about, sorted(options.items()))) + lowered.as_text()
  return hashlib.sha256(text.encode()).hexdigest()[:24]


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
