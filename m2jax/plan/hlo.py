"""Parses the text of a compiled program: its instructions and their numbers of runs.

XLA's cost analysis counts the body of a loop once and has no collectives; here loops
count with their trip counts. The grammar is that of HLO text after compilation, with
one instruction a line:

  [ROOT] %name = shape opcode(%operand, …), attribute=value, …

A shape has a layout: `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}` is in memory space 1 (VMEM on
TPU), in tiles of 8 x 128, whose padding counts as bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?')
_HEAD = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = ')
_NAMES = re.compile(r'%([\w.\-]+)')
_TILE = re.compile(r'T\(([\d,]+)\)')
_SPACE = re.compile(r'S\((\d+)\)')


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a shape.

  Attributes:
    dtype: such as 'bf16'.
    dims: sizes.
    minor_to_major: order of the dims in memory.
    tile: sizes of a tile over the most minor dims, major first; () is none.
    space: memory space; 0 is HBM.
  """

  dtype: str
  dims: tuple[int, ...]
  minor_to_major: tuple[int, ...] = ()
  tile: tuple[int, ...] = ()
  space: int = 0

  @property
  def bits(self) -> int:
    """Bits per element."""
    if self.dtype in _BITS:
      return _BITS[self.dtype]
    return int(re.search(r'\d+', self.dtype)[0])

  @property
  def bytes(self) -> float:
    """Without padding."""
    return math.prod(self.dims) * self.bits / 8

  @property
  def padded_bytes(self) -> float:
    """Bytes as stored, in whole tiles."""
    dims = list(self.dims)
    for dim, tile in zip(self.minor_to_major, reversed(self.tile), strict=False):
      dims[dim] = -(-dims[dim] // tile) * tile
    return math.prod(dims) * self.bits / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line.

  Attributes:
    name, opcode: text without the percent sign.
    arrays: the result's arrays; a tuple's in order.
    operands: names.
    attributes: the rest of the line.
    is_root: the computation's result.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  @property
  def op_name(self) -> str:
    """Its source in the traced program; '' for the compiler's own instructions."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ''

  def called(self, *keys: str) -> list[str]:
    """Computations named by attributes `keys` (to_apply, calls, body, …)."""
    names = []
    for key in keys:
      if found := re.search(rf'\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)', self.attributes):
        names += re.findall(r'[\w.\-]+', found[1].replace('%', ' '))
    return names


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program.

  Attributes:
    computations: name → instructions, in order of execution if it is scheduled.
    entry: name of the computation that runs.
  """

  computations: dict[str, tuple[Instruction, ...]]
  entry: str


def arrays(shape: str) -> tuple[Array, ...]:
  """All arrays of a shape or a (nested) tuple of shapes."""
  found = []
  for dtype, dims, layout in _ARRAY.findall(shape):
    order, _, rest = layout.partition(':')
    tile, space = _TILE.search(rest), _SPACE.search(rest)
    found.append(
      Array(
        dtype,
        _ints(dims),
        _ints(order),
        _ints(tile[1]) if tile else (),
        int(space[1]) if space else 0,
      )
    )
  return tuple(found)


def parse(text: str) -> Module:
  """A module from `compiled.as_text()`.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations, entry, current = {}, None, None
  for line in text.splitlines():
    if line.endswith('{') and not line.startswith(' '):
      name = line.split()[1 if line.startswith('ENTRY') else 0].lstrip('%')
      current = computations.setdefault(name.partition('(')[0].rstrip(), [])
      if line.startswith('ENTRY'):
        entry = name.partition('(')[0].rstrip()
    elif line.startswith('}'):
      current = None
    elif current is not None and (head := _HEAD.match(line)):
      current.append(_instruction(line, head))
  if entry is None:
    raise ValueError('not a compiled HLO module: it has no ENTRY computation')
  return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def _instruction(line: str, head: re.Match) -> Instruction:
  shape_end = _end(line, head.end())
  shape = line[head.end() : shape_end]
  opening = line.index('(', shape_end)
  opcode = line[shape_end:opening].strip()
  closing = _end(line, opening)
  operands = tuple(_NAMES.findall(line[opening:closing]))
  if opcode in ('constant', 'parameter'):  # its value, its number
    return Instruction(
      head[2], opcode, arrays(shape), (), line[opening:closing], bool(head[1])
    )
  attributes = line[closing:]
  return Instruction(
    head[2], opcode, arrays(shape), operands, attributes, bool(head[1])
  )


def _end(line: str, start: int) -> int:
  """End of the shape or of the parenthesis that begins at `start`."""
  if line[start] != '(':
    return line.index(' ', start)
  depth = 0
  for match in re.compile(r'[()]').finditer(line, start):
    depth += 1 if match[0] == '(' else -1
    if not depth:
      return match.end()
  raise ValueError(f'HLO line with an open parenthesis: {line[:200]}')


def trip_count(module: Module, loop: Instruction) -> int:
  """Number of iterations of a `while`: the bound that its counter is compared with.

  JAX's loops count from 0 by 1. A loop with a computed bound counts as one iteration.
  """
  if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes):
    return int(known[1])
  (condition,) = loop.called('condition')
  lines = {i.name: i for i in module.computations[condition]}
  root = next(i for i in lines.values() if i.is_root)
  compared = root
  if root.opcode == 'fusion':
    compared = next(
      i for i in module.computations[root.called('calls')[0]] if i.is_root
    )
  if compared.opcode != 'compare' or 'direction=LT' not in compared.attributes:
    return 1
  bounds = [lines[o] for o in root.operands if o in lines]
  bounds = [b for b in bounds if b.opcode == 'constant']
  return int(bounds[0].attributes.strip('()')) if bounds else 1


@dataclasses.dataclass(frozen=True)
class Execution:
  """An instruction of a running program.

  Attributes:
    instruction: itself.
    times: number of its runs in one run of the program.
    where: op_name of the loop that it is in, '' outside; for instructions of the
      compiler, which have no name.
    computation: name of the computation that it is in.
  """

  instruction: Instruction
  times: int
  where: str
  computation: str


def walk(module: Module) -> Iterator[Execution]:
  """Every instruction that runs, those of loops with the number of iterations.

  All branches of a conditional count. A fusion is one instruction, and so is an
  asynchronous call (see `inner`).
  """
  stack = [(module.entry, 1, '')]
  while stack:
    name, times, where = stack.pop()
    for line in module.computations[name]:
      yield Execution(line, times, where, name)
      if line.opcode == 'while':
        iterations = times * trip_count(module, line)
        inside = line.op_name or where
        stack += [(body, iterations, inside) for body in line.called('body')]
      elif line.opcode in ('call', 'conditional'):
        keys = ('to_apply', 'branch_computations', 'true_computation')
        called = line.called(*keys, 'false_computation')
        stack += [(body, times, where) for body in called]


def inner(module: Module, line: Instruction) -> list[Instruction]:
  """Instructions of the computations that a fusion or an asynchronous call runs.

  A call names its computation with `to_apply`, as a reduction names its operator; only
  for calls does that computation count. A synchronous `call` runs line by line (see
  `walk`), so nothing is inside it.
  """
  return [] if line.opcode == 'call' else _inside(module, line)


def _inside(module: Module, line: Instruction) -> list[Instruction]:
  keys = ('calls', 'called_computations', 'called_computation')
  if line.opcode in ('call', 'call-start'):
    keys += ('to_apply',)
  found = []
  for name in line.called(*keys):
    for inside in module.computations.get(name, ()):
      found.append(inside)
      if inside.opcode in ('fusion', 'call') or inside.opcode.endswith('-start'):
        found += _inside(module, inside)
  return found


def _ints(text: str) -> tuple[int, ...]:
  return tuple(int(n) for n in text.split(',') if n.strip().isdigit())
