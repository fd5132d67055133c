"""Collectives of a compiled program: kind, bytes, groups, and what overlaps them.

An asynchronous collective has a start and a done, in four notations:
`all-gather-start` … `all-gather-done`; `async-start` of a computation that contains the
collective; and on TPU `custom-call-start … called_computations=` (newer compilers) or
`call-start … to_apply=` (older ones) of one that a SparseCore runs. Instructions
between start and done overlap it and hide their own time of it. A collective that is
waited for at once is no better than a synchronous one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from m2jax.plan import hlo

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction.

  Attributes:
    kind: one of KINDS.
    bytes: size of the whole array on one device: the result of an all-gather or a
      permute, the operand of an all-reduce, a reduce-scatter or an all-to-all. For a
      ragged all-to-all, the smaller of its two buffers: the larger is sized for the
      worst case.
    group: devices that communicate, as positions in the mesh; the first group.
    times: number of its runs in one run of the program.
    where: op_name of the instruction or of its loop.
    asynchronous: it has a start and a done.
    computation, overlapping: instructions between the two, and their computation.
    instruction: itself, or its start.
  """

  kind: str
  bytes: float
  group: tuple[int, ...]
  times: int
  where: str
  asynchronous: bool
  computation: str = ''
  overlapping: tuple[hlo.Instruction, ...] = ()
  instruction: hlo.Instruction | None = None


def find(module: hlo.Module, devices: int) -> list[Collective]:
  """Every collective that runs between more than one device.

  Args:
    devices: number of devices of the mesh that the program was compiled for.
  """
  found = []
  dones: dict[str, dict[str, hlo.Instruction]] = {}
  for execution in hlo.walk(module):
    line, lines = execution.instruction, module.computations[execution.computation]
    asynchronous = line.opcode.endswith('-start')
    core, scope = line, lines
    if line.opcode.removesuffix('-start') not in KINDS:
      scope = hlo.inner(module, line)
      inside = [i for i in scope if i.opcode in KINDS]
      if not inside:
        continue
      core = inside[0]
    group = first_group(core, devices)
    if len(group) < 2:
      continue
    done = None
    if asynchronous:
      if execution.computation not in dones:
        dones[execution.computation] = _dones(lines)
      done = dones[execution.computation].get(line.name)
    found.append(
      Collective(
        core.opcode.removesuffix('-start'),
        _bytes(core, scope, done, len(group)),
        group,
        execution.times,
        core.op_name or line.op_name or execution.where,
        asynchronous,
        execution.computation,
        _between(lines, line, done),
        line,
      )
    )
  return found


def _dones(lines: Iterable[hlo.Instruction]) -> dict[str, hlo.Instruction]:
  """Start of an asynchronous instruction → its done; there may be updates between."""
  done, origin = {}, {}
  for line in lines:
    if line.opcode.endswith('-start'):
      origin[line.name] = line.name
    elif line.opcode.endswith(('-update', '-done')) and line.operands:
      start = origin.get(line.operands[0])
      if start is None:
        continue
      origin[line.name] = start
      if line.opcode.endswith('-done'):
        done[start] = line
  return done


def _between(lines, start, done) -> tuple[hlo.Instruction, ...]:
  if done is None:
    return ()
  names = [line.name for line in lines]
  return lines[names.index(start.name) + 1 : names.index(done.name)]


def _bytes(core, scope, done, group_size) -> float:
  kind, arrays = core.opcode.removesuffix('-start'), core.arrays
  if core.opcode.endswith('-start') and done is not None:
    arrays = done.arrays  # a start's shape has its operands and contexts as well
  size = sum(a.bytes for a in arrays)
  if kind == 'reduce-scatter':
    return size * group_size
  if kind == 'ragged-all-to-all':
    sent = [i.arrays for i in scope if core.operands[:1] == (i.name,)]
    return min([size, *(a[0].bytes for a in sent)])
  return size


def first_group(line: hlo.Instruction, devices: int) -> tuple[int, ...]:
  """Positions of the devices in a collective's first group, in any HLO notation.

  Raises:
    ValueError: an unknown notation.
  """
  text = line.attributes
  if pairs := re.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', text):
    links = re.findall(r'\{(\d+),(\d+)\}', pairs[1])
    return tuple(int(n) for n in links[0]) if links else ()
  if mesh := re.search(r'replica_groups=\w*mesh\[([^\]]*)\][^{]*\{([^}]*)\}', text):
    return _mesh_group(mesh[1], mesh[2])
  if iota := re.search(
    r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text
  ):
    return _iota_group(int(iota[2]), _ints(iota[3]), _ints(iota[4] or ''))
  if listed := re.search(r'replica_groups=\{(?:\{([\d,]+)\}[^}]*)?', text):
    return _ints(listed[1]) if listed[1] else tuple(range(devices))
  if 'replica_groups' not in text:
    return tuple(range(devices))
  raise ValueError(
    f'replica groups of {line.name} in an unknown notation: {text[:300]}'
  )


def _mesh_group(sizes: str, axes: str) -> tuple[int, ...]:
  """`'data'=2,'fsdp'=4` and `'fsdp'`: the devices along these axes, from device 0."""
  shape = {name: int(n) for name, n in re.findall(r"'?([\w.]+)'?=(\d+)", sizes)}
  wanted = re.findall(r"'?([A-Za-z_]\w*)'?", axes)
  strides, stride = {}, 1
  for name in reversed(shape):
    strides[name], stride = stride, stride * shape[name]
  group = (0,)
  for name in wanted:
    group = tuple(g + i * strides[name] for g in group for i in range(shape[name]))
  return group


def _iota_group(size: int, dims: tuple[int, ...], perm: tuple[int, ...]):
  """First `size` entries of iota(dims) transposed by `perm`."""
  perm = perm or tuple(range(len(dims)))
  strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
  shape = [dims[p] for p in perm]
  group = []
  for flat in range(size):
    at, rest = 0, flat
    for axis in reversed(range(len(shape))):
      rest, here = divmod(rest, shape[axis])
      at += here * strides[perm[axis]]
    group.append(at)
  return tuple(group)


def _ints(text: str) -> tuple[int, ...]:
  return tuple(int(n) for n in text.split(',') if n)
