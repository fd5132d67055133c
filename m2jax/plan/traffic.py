"""HBM bytes and matmuls of a compiled program's instructions, by stage.

An instruction reads its operands and writes its result if they are in HBM (VMEM is
free), with three exceptions, as in XLA's own cost analysis: of a sliced or gathered
operand only the slices count; an update in place counts the bytes that it writes; and a
kernel counts the bytes that it declares (`pallas.CostEstimate`). Buffers count whole:
those of dropless routing are sized for the worst case, and XLA's instructions read and
write all of them.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from m2jax.plan import hlo
from m2jax.plan.chips import Chip
from m2jax.plan.collectives import KINDS

_FREE = (
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'while',
  'call',
  'conditional',
  'after-all',
  'opt-barrier',
  'partition-id',
  'replica-id',
)
_SLICES = ('dynamic-slice', 'slice', 'gather')
_UPDATES = ('dynamic-update-slice', 'scatter')  # in place, of their first operand
_SEE_THROUGH = ('bitcast', 'reshape', 'get-tuple-element')
_DECLARED = re.compile(r'"bytes_accessed":"?(\d+)')
_FLOPS = re.compile(r'"flops":"?(\d+)')
_KERNEL = 'custom_call_target="tpu_custom_call"'


def stage(op_name: str) -> tuple[str, str]:
  """(pass, part) of an op by its name: `named_scope`s, and what JAX adds to them."""
  part = 'rest'
  if 'jit(apply)' in op_name or 'jit(add)' in op_name:
    part = 'optimizer'
  for scope in ('attention', 'moe'):
    if f'/{scope}/' in op_name or op_name.endswith(f'/{scope}'):
      part = scope
  if 'rematted_computation' in op_name:
    return 'recompute', part
  return ('backward' if 'transpose(' in op_name else 'forward'), part


class Work(NamedTuple):
  """What one instruction does in one of its runs on one device.

  Attributes:
    stage: (pass, part).
    times: number of its runs in one run of the program.
    hbm_bytes: bytes that it moves.
    flops: FLOPs of its matmuls, without padding, and those that a kernel declares.
    communicates: it is a collective, whose bytes move while the links are busy
      (`estimate`).
  """

  stage: tuple[str, str]
  times: int
  hbm_bytes: float
  flops: float
  communicates: bool = False


def work(module: hlo.Module) -> list[Work]:
  """The instructions of one run that move bytes or multiply matrices."""
  found = []
  known: dict[str, dict[str, hlo.Instruction]] = {}
  for execution in hlo.walk(module):
    line = execution.instruction
    if execution.computation not in known:
      lines = module.computations[execution.computation]
      known[execution.computation] = {i.name: i for i in lines}
    beside = known[execution.computation]
    size, flops = moved(module, line, beside), product_flops(module, line, beside)
    if size or flops:
      name = line.op_name or execution.where
      collective = communicates(module, line)
      found.append(Work(stage(name), execution.times, size, flops, collective))
  return found


def communicates(module: hlo.Module, line: hlo.Instruction) -> bool:
  """Whether it is a collective, or starts one."""
  if line.opcode.removesuffix('-start') in KINDS:
    return True
  starts = line.opcode.endswith('-start')
  return starts and any(i.opcode in KINDS for i in hlo.inner(module, line))


def moved(
  module: hlo.Module, line: hlo.Instruction, known: dict[str, hlo.Instruction]
) -> float:
  """HBM bytes of one run of an instruction; `known`: its computation's, by name."""
  op = line.opcode
  if op in _FREE or op.endswith(('-done', '-update')):
    return 0.0

  def operand(i):
    of = known.get(line.operands[i]) if i < len(line.operands) else None
    return _hbm(_result(of, known)) if of is not None else 0.0

  everything = range(len(line.operands))
  if op.endswith('-start'):
    inside = hlo.inner(module, line)
    if op in ('copy-start', 'slice-start', 'dynamic-slice-start'):
      read = operand(0) if op == 'copy-start' else _hbm(line.arrays[:1])
      return read + _hbm(line.arrays[:1])
    if op.removesuffix('-start') in KINDS:
      return _hbm(line.arrays[:2])
    results = [i.arrays for i in inside if i.is_root] or [line.arrays[:1]]
    return 2 * _hbm(results[-1])  # a slice, a gather or a collective: read and written
  if op == 'custom-call':
    if _KERNEL not in line.attributes:
      return 0.0
    if declared := _DECLARED.search(line.attributes):
      return float(declared[1])
    return _hbm(line.arrays) + sum(map(operand, everything))
  if op in _SLICES:
    return 2 * _hbm(line.arrays)
  if op == 'dynamic-update-slice':
    return 2 * operand(1)
  if op == 'scatter':
    return 3 * operand(len(line.operands) - 1)
  if op == 'fusion':
    (body,) = line.called('calls')
    reads, writes = _fusion(module, body)
    total = 0.0
    for i in everything:
      whole = operand(i)
      total += whole if i not in reads else min(whole, reads[i])
    return total + (_hbm(line.arrays) if writes is None else writes)
  return _hbm(line.arrays) + sum(map(operand, everything))


def product_flops(
  module: hlo.Module, line: hlo.Instruction, known: dict[str, hlo.Instruction]
) -> float:
  """FLOPs of the matmuls in one run of an instruction, and those a kernel declares.

  fp32 at high precision counts as the bfloat16 products that compute it.

  Args:
    known: the instructions of its computation, by name.
  """
  if _KERNEL in line.attributes:
    declared = _FLOPS.search(line.attributes)
    return float(declared[1]) if declared else 0.0
  lines = [line]
  if line.opcode == 'fusion':
    lines = hlo.inner(module, line)
    known = {i.name: i for i in lines}
  total = 0.0
  for i in lines:
    if i.opcode in ('dot', 'convolution') and i.operands[0] in known:
      result, left = i.arrays[0].dims, known[i.operands[0]].arrays[0]
      once = 2.0 * math.prod(result) * _contracted(i, left.dims)
      total += once * (_products(i) if left.dtype == 'f32' else 1)
  return total


def _products(line: hlo.Instruction) -> int:
  """Products in bfloat16 that a matmul of fp32 is computed by."""
  precision = re.search(r'operand_precision=\{(\w+)', line.attributes)
  return {'highest': 6, 'high': 3}.get(precision[1] if precision else '', 1)


def _contracted(line: hlo.Instruction, left: tuple[int, ...]) -> int:
  """Contracted size of a dot, or of a convolution (XLA's form of matmuls on TPU)."""
  if found := re.search(r'lhs_contracting_dims=\{([\d,]*)\}', line.attributes):
    return math.prod(left[int(d)] for d in found[1].split(',') if d)
  labels = re.search(r'dim_labels=(\w+)_', line.attributes)
  if not labels or len(labels[1]) != len(left):
    return 1
  window = re.search(r'window=\{size=([\dx]+)', line.attributes)
  sides = window[1].split('x') if window else ()
  return left[labels[1].index('f')] * math.prod(int(n) for n in sides)


def seconds(
  module: hlo.Module, lines: Iterable[hlo.Instruction], computation: str, chip: Chip
) -> float:
  """Time of these instructions of a computation at their roofline, one by one."""
  known = {i.name: i for i in module.computations[computation]}
  total = 0.0
  for line in lines:
    if line.opcode == 'while':
      (body,) = line.called('body')
      iteration = seconds(module, module.computations[body], body, chip)
      total += hlo.trip_count(module, line) * iteration
      continue
    if line.opcode.endswith('-start') and line.opcode != 'copy-start':
      continue  # asynchronous as well: it takes none of this time
    total += max(
      moved(module, line, known) / chip.hbm_bandwidth,
      product_flops(module, line, known) / chip.peak_flops,
    )
  return total


def _result(line: hlo.Instruction, known) -> tuple[hlo.Array, ...]:
  """Arrays of an operand; of a `copy-start` only the copied one."""
  if line.opcode == 'copy-start':
    return line.arrays[:1]
  return line.arrays


def _hbm(arrays) -> float:
  return sum(a.padded_bytes for a in arrays if a.space == 0)


def _fusion(module: hlo.Module, body: str):
  """(operand → bytes read, where that is less than all of it), bytes written or None.

  An operand is read in part where every use of it is a slice, and not at all where it
  is only updated in place.
  """
  lines = module.computations[body]
  known = {i.name: i for i in lines}
  uses = collections.defaultdict(list)
  for line in lines:
    for position, name in enumerate(line.operands):
      uses[name].append((line, position))

  def read(name: str) -> float | None:
    total = 0.0
    for line, position in uses[name]:
      if line.opcode in _SLICES and position == 0:
        total += sum(a.padded_bytes for a in line.arrays)
      elif line.opcode in _UPDATES and position == 0:
        continue
      elif line.opcode in _SEE_THROUGH:
        below = read(line.name)
        if below is None:
          return None
        total += below
      elif line.opcode == 'fusion':
        reads, _ = _fusion(module, line.called('calls')[0])
        if position not in reads:
          return None
        total += reads[position]
      else:
        return None
    return total

  reads = {}
  for line in lines:
    if line.opcode == 'parameter':
      number = int(line.attributes.strip('()'))
      part = read(line.name)
      if part is not None:
        reads[number] = part
  return reads, _written(module, known, next(i for i in lines if i.is_root))


def _written(module, known, root: hlo.Instruction) -> float | None:
  """Bytes that a fusion writes where its result is an update in place, else None."""
  while root.opcode in _SEE_THROUGH and root.operands[0] in known:
    root = known[root.operands[0]]
  if root.opcode in _UPDATES:
    update = known[root.operands[1 if root.opcode == 'dynamic-update-slice' else -1]]
    return 2 * sum(a.padded_bytes for a in update.arrays)
  if root.opcode == 'fusion':
    lines = module.computations[root.called('calls')[0]]
    inner = {i.name: i for i in lines}
    return _written(module, inner, next(i for i in lines if i.is_root))
  return None
