"""Roofline of a workload from its compiled programs, instruction by instruction.

The time of an instruction is the larger of its FLOPs over the peak and its HBM bytes
over the bandwidth. A stage is a part of the model (attention, moe, the rest, the
optimizer) in one pass (forward, recomputation, backward); its FLOPs are counted by hand
(`flops`), padding included, and divided over its instructions in proportion to their
matmuls in the compiled program. Collectives add their time, that of the links or of
their HBM bytes, whichever is longer. An asynchronous one is hidden for the time that
the instructions between its start and its done take at their roofline; a pass takes at
least the time of the collectives that it hides, and of all its HBM bytes. Only what the
compiled program overlaps counts as overlapped, and everything runs at its roofline: a
real step is slower. These are compile-time facts, not measurements (DESIGN law 10).

The bound has every part at its roofline; an estimate divides the parts by the shares of
the roofline that published runs reach (`efficiency`). What the bound hides stays
hidden.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from m2jax.plan import collectives, efficiency, flops, ici, traffic
from m2jax.plan.chips import Chip
from m2jax.plan.compile import Compiled, Memory
from m2jax.plan.efficiency import Efficiency
from m2jax.plan.topology import Topology

_PASS = {'forward': 'forward', 'recompute': 'backward', 'backward': 'backward'}


@dataclasses.dataclass(frozen=True)
class Stage:
  """One part of one pass, in one run of a program.

  Attributes:
    compute_bound_s, hbm_bound_s: time of its instructions, by what bounds each.
    core_s: attention's kernels, a part of compute_bound_s.
  """

  name: str
  flops: float
  hbm_bytes: float
  compute_bound_s: float
  hbm_bound_s: float
  core_s: float = 0.0

  @property
  def seconds(self) -> float:
    """Time of all its instructions, each at its roofline."""
    return self.compute_bound_s + self.hbm_bound_s

  def seconds_at(self, share: Efficiency) -> float:
    """Time of all its instructions, each at its share of its roofline."""
    is_experts = self.name.endswith(' moe')
    products = (self.compute_bound_s - self.core_s) / (
      share.experts if is_experts else share.matmul
    )
    return products + self.core_s / share.attention + self.hbm_bound_s / share.hbm


@dataclasses.dataclass(frozen=True)
class Traffic:
  """All collectives of one kind over groups of one size, in one run of a program.

  Attributes:
    count, bytes: totals over all of them (see `Collective.bytes`).
    hidden_s, exposed_s: time on the links that overlaps other work, and that does not.
  """

  kind: str
  group: int
  count: int
  bytes: float
  hidden_s: float
  exposed_s: float


@dataclasses.dataclass(frozen=True)
class Links:
  """All collectives of a pass, in one run of a program.

  Attributes:
    name: 'forward' or 'backward', with what is recomputed.
    hidden_s, exposed_s: see Traffic.
    least_s: time to move all the pass's HBM bytes.
  """

  name: str
  hidden_s: float
  exposed_s: float
  least_s: float


@dataclasses.dataclass(frozen=True)
class Estimate:
  """One program, one run.

  Attributes:
    runs: number of runs in a step.
  """

  name: str
  runs: int
  memory: Memory
  stages: tuple[Stage, ...]
  collectives: tuple[Traffic, ...]
  passes: tuple[Links, ...]
  compile_s: float

  @property
  def seconds(self) -> float:
    """Time of one run, at the roofline."""
    return self.seconds_at(efficiency.ROOF)

  def seconds_at(self, share: Efficiency, experts: float = 1.0) -> float:
    """Time of one run at shares of the roofline, with `experts` times experts' work."""
    total = 0.0
    for part in self.passes:
      work = sum(
        s.seconds_at(share) * (experts if s.name.endswith(' moe') else 1)
        for s in self.stages
        if _PASS[s.name.split()[0]] == part.name
      )
      exposed = part.exposed_s / share.links
      least = part.least_s / share.hbm - exposed
      total += max(work, part.hidden_s / share.links, least) + exposed
    return total


@dataclasses.dataclass(frozen=True)
class Plan:
  """A workload on a slice.

  Attributes:
    job: the job that runs these programs; None if no job does.
    tokens: new tokens of a step, over all devices.
    useful_flops: useful FLOPs of a step, on one device.
    parameters_bytes, optimizer_bytes: size on one device, without padding.
  """

  workload: str
  job: str | None
  topology: str
  devices: int
  mesh: dict[str, int | str | None]
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
    """Time of a step, or of a call, at the roofline."""
    return sum(p.runs * p.seconds for p in self.programs)

  def estimate_s(
    self, share: Efficiency = efficiency.CALIBRATED, imbalance: float = 1.0
  ) -> float:
    """Time of a step, or of a call, at shares of the roofline.

    Args:
      imbalance: assignments of the busiest chip's experts over the mean. It changes
        nothing where every chip has all experts, each for its own tokens.
    """
    experts = imbalance if self.splits_experts else 1.0
    return sum(p.runs * p.seconds_at(share, experts) for p in self.programs)

  @property
  def splits_experts(self) -> bool:
    """Whether the busiest expert's chip is waited for."""
    return self.mesh['expert'] > 1

  def share(self, seconds: float) -> float:
    """Useful FLOPs over the FLOPs at peak in the time of a step."""
    return self.useful_flops / (seconds * self.peak_flops)

  @property
  def share_of_peak(self) -> float:
    """At the roofline: an upper bound."""
    return self.share(self.seconds)

  @property
  def memory_bytes(self) -> int:
    """The most of any program of a step."""
    return max(p.memory.total for p in self.programs if p.runs)

  @property
  def fits(self) -> bool:
    """Whether that is within HBM."""
    return self.memory_bytes <= self.hbm_bytes

  @property
  def chunk_bytes(self) -> int:
    """The most of any program of chunks; 0 without."""
    return max((p.memory.total for p in self.programs if not p.runs), default=0)


def estimate(
  compiled: Compiled,
  counted: flops.Stages,
  topology: Topology,
  core: Mapping[str, float] | None = None,
) -> Estimate:
  """The roofline of one program.

  Args:
    counted: (pass, part) → FLOPs of one run on one device.
    core: pass → those of attention's kernels.
  """
  parts = stages(traffic.work(compiled.module), counted, topology.chip, core or {})
  links, by_pass = _links(compiled, topology)
  passes = []
  for name in ('forward', 'backward'):
    own = [s for s in parts if _PASS[s.name.split()[0]] == name]
    least = sum(s.hbm_bytes for s in own) / topology.chip.hbm_bandwidth
    passes.append(Links(name, *by_pass[name], least))
  return Estimate(
    compiled.name,
    compiled.runs,
    compiled.memory,
    parts,
    links,
    tuple(passes),
    compiled.seconds,
  )


def stages(
  work: Sequence[traffic.Work],
  counted: flops.Stages,
  chip: Chip,
  core: Mapping[str, float] | None = None,
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
      if w.communicates:
        continue
      product_s = w.times * factor * w.flops / chip.peak_flops
      moving_s = w.times * w.hbm_bytes / chip.hbm_bandwidth
      if product_s >= moving_s:
        compute_s += product_s
      else:
        hbm_s += moving_s
    if not products:  # no instruction has them: a kernel that declares none
      compute_s = max(total / chip.peak_flops - hbm_s, 0.0)
    kernel = (core or {}).get(key[0], 0.0) if key[1] == 'attention' else 0.0
    core_s = compute_s * kernel / total if total else 0.0
    found.append(Stage(' '.join(key), total, moved, compute_s, hbm_s, core_s))
  return tuple(found)


def _links(compiled: Compiled, topology: Topology):
  """Collectives by kind and group, and (hidden, exposed) seconds of each pass."""
  coords = [tuple(d.coords) for d in compiled.devices]
  sums = collections.defaultdict(lambda: [0, 0.0, 0.0, 0.0])
  by_pass = collections.defaultdict(lambda: [0.0, 0.0])
  for c in collectives.find(compiled.module, len(coords)):
    group = [coords[i] for i in c.group]
    lines = {i.name: i for i in compiled.module.computations[c.computation]}
    memory = traffic.moved(compiled.module, c.instruction, lines)
    once = max(
      ici.seconds(c.kind, c.bytes, group, topology.shape, topology.chip),
      memory / topology.chip.hbm_bandwidth,
    )
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
