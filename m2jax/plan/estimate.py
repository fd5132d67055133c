"""Roofline of a workload from its compiled programs, stage by stage.

A stage is a part of the model (attention, moe, the rest, the optimizer) in one pass
(forward, recomputation, backward). Its time is the larger of its FLOPs over the peak
and its HBM bytes over the bandwidth. Collectives add their time. An asynchronous one is
hidden for the time that the instructions between its start and its done take at their
roofline; a pass takes at least the time of the collectives that it hides. Only what the
compiled program overlaps is taken to overlap, and everything to run at its roofline: a
real step is slower. These are compile-time facts, not measurements (DESIGN law 10).
"""

from __future__ import annotations

import collections
import dataclasses

from m2jax.plan import collectives, flops, ici, traffic
from m2jax.plan.compile import Compiled, Memory
from m2jax.plan.topology import Topology

_PASS = {'forward': 'forward', 'recompute': 'backward', 'backward': 'backward'}


@dataclasses.dataclass(frozen=True)
class Stage:
  """One part of one pass, in one run of a program."""

  name: str
  flops: float
  hbm_bytes: float
  compute_s: float
  hbm_s: float

  @property
  def seconds(self) -> float:
    """The larger of the two."""
    return max(self.compute_s, self.hbm_s)


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
    tokens: new tokens of a step, of all devices.
    useful_flops: of a step, on one device.
    parameters_bytes, optimizer_bytes: on one device, without padding.
  """

  workload: str
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
  chip = topology.chip
  moved = traffic.by_stage(compiled.module)
  stages = tuple(
    Stage(
      ' '.join(key),
      counted.get(key, 0.0),
      moved.get(key, 0.0),
      counted.get(key, 0.0) / chip.peak_flops,
      moved.get(key, 0.0) / chip.hbm_bandwidth,
    )
    for key in sorted(set(counted) | set(moved))
  )
  links, by_pass = _links(compiled, topology)
  seconds = 0.0
  for name in ('forward', 'backward'):
    work = sum(s.seconds for s in stages if _PASS[s.name.split()[0]] == name)
    hidden, exposed = by_pass[name]
    seconds += max(work, hidden) + exposed
  return Estimate(
    compiled.name,
    compiled.runs,
    compiled.memory,
    stages,
    links,
    seconds,
    compiled.seconds,
  )


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
