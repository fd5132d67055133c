"""Roofline of a workload from its compiled programs, instruction by instruction.

The time of an instruction is the larger of its FLOPs over the peak and its HBM bytes
over the bandwidth. A stage is a part of the model (attention, moe, the rest, the
optimizer) in one pass (forward, recomputation, backward); its FLOPs are counted by hand
(`flops`), padding included, and divided over its instructions as the compiled program
has their matmuls. Collectives add their time. An asynchronous one is
hidden for the time that the instructions between its start and its done take at their
roofline; a pass takes at least the time of the collectives that it hides. Only what the
compiled program overlaps is taken to overlap, and everything to run at its roofline: a
real step is slower. These are compile-time facts, not measurements (DESIGN law 10).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from m2jax.plan import collectives, flops, ici, traffic
from m2jax.plan.chips import Chip
from m2jax.plan.compile import Compiled, Memory
from m2jax.plan.topology import Topology

_PASS = {'forward': 'forward', 'recompute': 'backward', 'backward': 'backward'}


@dataclasses.dataclass(frozen=True)
class Stage:
  """One part of one pass, in one run of a program.

  Attributes:
    compute_bound_s, hbm_bound_s: time of its instructions, by what bounds each.
  """

  name: str
  flops: float
  hbm_bytes: float
  compute_bound_s: float
  hbm_bound_s: float

  @property
  def seconds(self) -> float:
    """Of all its instructions, each at its roofline."""
    return self.compute_bound_s + self.hbm_bound_s


@dataclasses.dataclass(frozen=True)
class Traffic:
  """All collectives of one kind over groups of one size, in one run of a program.

  Attributes:
    count, bytes: of all of them (see `Collective.bytes`).
    hidden_s, exposed_s: time on the links that overlaps other work, and that does not.
  """

  kind: str
  group: int
  count: int
  bytes: float
  hidden_s: float
  exposed_s: float


@dataclasses.dataclass(frozen=True)
class Estimate:
  """One program, one run.

  Attributes:
    runs: in a step.
    seconds: of one run.
  """

  name: str
  runs: int
  memory: Memory
  stages: tuple[Stage, ...]
  collectives: tuple[Traffic, ...]
  seconds: float
  compile_s: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """A workload on a slice.

  Attributes:
    job: that runs these programs; None if no job does.
    tokens: new tokens of a step, of all devices.
    useful_flops: of a step, on one device.
    parameters_bytes, optimizer_bytes: on one device, without padding.
  """

  workload: str
  job: str | None
  topology: str
  devices: int
  mesh: dict[str, int | str]
  rows: int
  passes: int
  tokens: int
  useful_flops: float
  peak_flops: float
  hbm_bytes: float
  parameters_bytes: int
  optimizer_bytes: int
  programs: tuple[Estimate, ...]

  @property
  def seconds(self) -> float:
    """Of a step, or of a call."""
    return sum(p.runs * p.seconds for p in self.programs)

  @property
  def share_of_peak(self) -> float:
    """Useful FLOPs over the FLOPs at peak in the same time."""
    return self.useful_flops / (self.seconds * self.peak_flops)

  @property
  def memory_bytes(self) -> int:
    """The most of any program."""
    return max(p.memory.total for p in self.programs)

  @property
  def fits(self) -> bool:
    """Whether that is within HBM."""
    return self.memory_bytes <= self.hbm_bytes


def estimate(compiled: Compiled, counted: flops.Stages, topology: Topology) -> Estimate:
  """The roofline of one program.

  Args:
    counted: (pass, part) → FLOPs of one run on one device.
  """
  parts = stages(traffic.work(compiled.module), counted, topology.chip)
  links, by_pass = _links(compiled, topology)
  seconds = 0.0
  for name in ('forward', 'backward'):
    work = sum(s.seconds for s in parts if _PASS[s.name.split()[0]] == name)
    hidden, exposed = by_pass[name]
    seconds += max(work, hidden) + exposed
  return Estimate(
    compiled.name,
    compiled.runs,
    compiled.memory,
    parts,
    links,
    seconds,
    compiled.seconds,
  )


def stages(
  work: Sequence[traffic.Work], counted: flops.Stages, chip: Chip
) -> tuple[Stage, ...]:
  """The stages of a program.

  The FLOPs that `counted` has for a stage are divided as `work` has its matmuls; other
  stages have those of `work`.
  """
  by_stage = collections.defaultdict(list)
  for one in work:
    by_stage[one.stage].append(one)
  found = []
  for key in sorted(set(counted) | set(by_stage)):
    parts = by_stage[key]
    moved = sum(w.times * w.hbm_bytes for w in parts)
    products = sum(w.times * w.flops for w in parts)
    total = counted.get(key, products)
    factor = total / products if products else 0.0
    compute_s = hbm_s = 0.0
    for w in parts:
      product_s = w.times * factor * w.flops / chip.peak_flops
      moving_s = w.times * w.hbm_bytes / chip.hbm_bandwidth
      if product_s >= moving_s:
        compute_s += product_s
      else:
        hbm_s += moving_s
    if not products:  # no instruction has them: a kernel that declares none
      compute_s = max(total / chip.peak_flops - hbm_s, 0.0)
    found.append(Stage(' '.join(key), total, moved, compute_s, hbm_s))
  return tuple(found)


def _links(compiled: Compiled, topology: Topology):
  """Collectives by kind and group, and (hidden, exposed) seconds of each pass."""
  coords = [tuple(d.coords) for d in compiled.devices]
  sums = collections.defaultdict(lambda: [0, 0.0, 0.0, 0.0])
  by_pass = collections.defaultdict(lambda: [0.0, 0.0])
  for c in collectives.find(compiled.module, len(coords)):
    group = [coords[i] for i in c.group]
    once = ici.seconds(c.kind, c.bytes, group, topology.shape, topology.chip)
    total = sums[c.kind, len(c.group)]
    total[0] += c.times
    total[1] += c.times * c.bytes
    overlapping = traffic.seconds(
      compiled.module, c.overlapping, c.computation, topology.chip
    )
    hidden = min(once, overlapping)
    which = _PASS[traffic.stage(c.where)[0]]
    for i, part in enumerate((hidden, once - hidden)):
      total[2 + i] += c.times * part
      by_pass[which][i] += c.times * part
  found = tuple(
    Traffic(kind, group, *values) for (kind, group), values in sorted(sums.items())
  )
  return found, by_pass
