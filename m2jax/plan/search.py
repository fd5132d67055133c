"""Search for the mesh of a workload: all meshes by a formula, the best few compiled.

The formula ranks candidates and is not for reports: compute as in `flops`, HBM traffic
of weights and of the experts' rows, and the large collectives on the links of their
groups, as often as the lowered step has them (`Counts`). It assumes that gathers and
scatters of weights are hidden and everything else is exposed; overlap, traffic and
memory are exact only for the few that are then compiled.

Axes: T tokens of a device, D model, E experts, k experts of a token, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import logging

from m2jax import params
from m2jax import sharding as sharding_lib
from m2jax.config import REMAT, ModelConfig
from m2jax.moe import exchange
from m2jax.plan import efficiency, flops, ici, plan, programs
from m2jax.plan.compile import DoesNotCompile
from m2jax.plan.topology import Topology
from m2jax.plan.workloads import TRAINING, Placed, PlanConfig, Workload
from m2jax.sharding import MESH_AXES, PRESETS, MeshConfig, Rules, Sharding

_RULES = {True: ('fsdp', 'fsdp_ep'), False: ('serve',)}
_ROW_TILE = 8  # rows of a TPU's tile; XLA gathers narrower shards of D by all-reduce
# As compiled: [rows, D] arrays that are alive at once in a backward pass (7 in
# pretrain_8k, 12 to 20 at longer contexts); gathered weights of a block that XLA
# converts and copies, as a multiple of their bytes, in a step.
_BUFFERS_ALIVE, _WEIGHTS_MOVED = 12, 4.7


@dataclasses.dataclass(frozen=True)
class Counts:
  """Collectives of one block in one pass over the batch.

  Attributes:
    weight_gathers, weight_scatters: all-gathers and reduce-scatters of the block's
      weights.
    exchanges: exchanges of [T·k, D] rows with devices that have other experts.
    gathers, scatters: all-gathers and reduce-scatters of [T, D] activations over
      devices that split the residual stream, where the rules split it.
    sums: all-reduces of the same, where they do not.
  """

  weight_gathers: int
  weight_scatters: int
  exchanges: int
  gathers: int
  scatters: int
  sums: int


def counts(remat: str, training: bool, split_residual: bool) -> Counts:
  """How often a block communicates, by its remat policy.

  Forward: attention and experts each gather their tokens and scatter their sums; the
  rows go to the experts and return. Backward: the same transposed, but rows and
  cotangents go to the experts and the rows' gradient returns (`moe.exchange`). What is
  recomputed repeats both gathers of tokens and the sum after attention, as no policy
  saves them; the sum after the experts is not needed again.
  """
  if not training:
    return Counts(0, 0, 2, *((2, 2, 0) if split_residual else (0, 0, 2)))
  again = remat != 'none'
  gathers, scatters = 2 + 2 + 2 * again, 2 + 2 + again
  if not split_residual:  # a sum's transpose is a sum
    return Counts(2, 1, 2 + 3, 0, 0, 4 + again)
  return Counts(2, 1, 2 + 3, gathers, scatters, 0)


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A mesh and its estimate by the formula.

  Attributes:
    placed: the workload, with its remat, on the mesh.
    seconds: time of a step or a call.
    memory_bytes: memory used on a device.
  """

  placed: Placed
  seconds: float
  memory_bytes: float


def meshes(devices: int, rules: str) -> Iterator[MeshConfig]:
  """All meshes of powers of two with `devices` devices that the rules can use."""
  used = PRESETS[rules]
  names = ('rows', 'tokens', 'vocab', 'heads', 'experts', 'expert_hidden')
  split = {axis for name in names for axis in used.mesh_axes(name)}
  axes = [axis for axis in MESH_AXES if axis in split]

  def sizes(left, axes):
    if len(axes) == 1:
      yield (left,)
      return
    size = 1
    while size <= left:
      if left % size == 0:
        for rest in sizes(left // size, axes[1:]):
          yield (size, *rest)
      size *= 2

  for found in sizes(devices, axes):
    yield MeshConfig(**dict(zip(axes, found, strict=True)), rules=rules)


def candidates(
  config: PlanConfig, name: str, workload: Workload, topology: Topology
) -> list[Candidate]:
  """Every mesh, number of passes and choice of remat that fits, the fastest first.

  Raises:
    ValueError: none fits.
  """
  training = workload.kind in TRAINING
  devices, found = len(topology.devices), []
  for rules in _RULES[training]:
    for mesh in meshes(devices, rules):
      if training and (mesh.expert == 1) != (rules == 'fsdp'):
        continue
      where = Sharding(sharding_lib.abstract_mesh(mesh), sharding_lib.rules_of(mesh))
      storage = where.size('model')
      if storage > 1 and config.model.embed_dim // storage % _ROW_TILE:
        continue
      passes = 1
      while passes <= (workload.rows if training else 1):
        placed = Placed(name, workload, mesh, passes)
        passes *= 2
        try:
          where.check(config.model)
          where.check_batch(placed.micro_rows, workload.context if training else None)
        except ValueError:
          break
        for remat in REMAT if training else ('none',):
          chosen = dataclasses.replace(workload, remat=remat)
          one = dataclasses.replace(placed, workload=chosen)
          seconds, memory = formula(config, one, where, topology)
          if memory <= topology.chip.hbm_bytes:
            found.append(Candidate(one, seconds, memory))
  if not found:
    raise ValueError(
      f'workload {name!r}: no mesh of {devices} devices fits '
      f'{topology.chip.hbm_bytes / 2**30:.0f} GiB; take more chips or fewer rows'
    )
  return sorted(found, key=lambda c: c.seconds)


def formula(
  config: PlanConfig, placed: Placed, where: Sharding, topology: Topology
) -> tuple[float, float]:
  """(seconds of a step, bytes of a device); see the module's docstring."""
  training = placed.workload.kind in TRAINING
  config = dataclasses.replace(config, model=placed.model(config.model))
  cfg = config.model if training else programs.served(config)
  chip, part = topology.chip, plan.local_part(config, placed, where)
  T, D, k = part.tokens, cfg.embed_dim, cfg.experts_per_token
  layer = _layer_bytes(cfg, where, 2)
  rows, rounds = T * k, 1
  if shards := len(where.axes('experts')) and where.size('experts'):
    factor = where.rules.exchange_factor
    rows = exchange.buffer_rows(T, k, shards, part.experts, factor)
    rounds = math.ceil(T * k / rows)  # of experts with equal loads
  buffer = 2.0 * rows * D

  blocks = cfg.num_layers + (cfg.num_mtp_modules if training else 0)
  again = cfg.remat != 'none' or bool(shards)  # `moe.exchange` always recomputes
  forwards = 1 + (2 + again if training else 0)  # a backward pass is two
  compute = sum(flops.executed(cfg, part, chip.mxu, training).values())
  cache = _cache_bytes(cfg, placed, where) if not training else 0.0
  forward, backward = efficiency.ROW_ARRAYS
  if training:  # beside the kernels, which compute bounds
    arrays = forward * (1 + again) + backward
    moved = blocks * (rounds * arrays * buffer + _WEIGHTS_MOVED * layer)
    work = compute / chip.peak_flops + moved / chip.hbm_bandwidth
  else:
    moved = blocks * (rounds * forward * buffer + layer) + cache
    work = max(compute / chip.peak_flops, moved / chip.hbm_bandwidth)

  def links(kind, size, *logical):
    group = _group(where, topology, logical)
    if len(group) < 2:
      return 0.0
    return ici.seconds(kind, size, group, topology.shape, chip)

  n = counts(cfg.remat, training, bool(where.axes('residual')))
  hidden = blocks * n.weight_gathers * links('all-gather', layer, 'model')
  hidden += blocks * n.weight_scatters * links('reduce-scatter', 2 * layer, 'model')
  exposed = blocks * n.exchanges * links('all-to-all', 2.0 * T * k * D, 'experts')
  activations = 2.0 * T * D
  exposed += blocks * n.gathers * links('all-gather', activations, 'residual')
  exposed += blocks * n.scatters * links('reduce-scatter', activations, 'residual')
  exposed += blocks * n.sums * links('all-reduce', activations, 'heads')
  keys = 2.0 * 2 * part.rows * placed.workload.context * part.kv_heads * cfg.head_dim
  state = _state_bytes(config if training else None, cfg, where)
  gradients = state / 3 if training else 0.0
  if training:
    exposed += blocks * forwards * links('all-gather', keys, 'tokens')
    exposed += links('all-reduce', gradients, 'data') if placed.mesh.data > 1 else 0.0
  seconds = placed.passes * (max(work, hidden) + exposed)

  memory = state + cache + 2 * layer + buffer * (_BUFFERS_ALIVE if training else 2)
  if training:
    memory += gradients * min(placed.passes, 2) + 2 * layer  # of a layer, fp32
    memory += 3 * 4.0 * D * part.vocab  # of the head
    saved = _saved_bytes(cfg, part, where.size('residual'), buffer)
    memory += cfg.num_layers * saved
  return seconds, memory


def _saved_bytes(cfg: ModelConfig, part: flops.Local, shards: int, buffer: float):
  """Bytes that a block saves for the backward pass, by its remat policy."""
  T, D = part.tokens, cfg.embed_dim
  own = T / shards  # of the residual stream
  return {
    'none': 2.0 * own * (10 * D) + _BUFFERS_ALIVE * buffer,
    'layer': 2.0 * own * D,
    'attention': 2.0 * own * D + T * part.heads * (2.0 * cfg.head_dim + 4),
  }[cfg.remat]


def compiled(
  config: PlanConfig,
  candidates: Sequence[Candidate],
  topology: Topology,
  store: pathlib.Path | None = None,
) -> Iterator[plan.estimate.Plan]:
  """Plans of candidates, compiled one by one; logs and skips what does not compile.

  Raises:
    ValueError: as `plan.make`.
    DoesNotCompile: the last, if none compiles.
  """
  failures = []
  for number, candidate in enumerate(candidates, 1):
    try:
      made = plan.make(config, candidate.placed, topology, store)
    except DoesNotCompile as error:
      failures.append(error)
      logging.warning('mesh %d of %d: %s', number, len(candidates), error)
    else:
      yield made
  if failures and len(failures) == len(candidates):
    raise failures[-1]


@functools.lru_cache(maxsize=64)
def _leaves(cfg: ModelConfig, rules: Rules) -> list[tuple[int, tuple[str, ...]]]:
  """(size, mesh axes that split it) of every parameter."""
  shapes = params.shapes(cfg)['params']
  specs = sharding_lib.param_specs(cfg, rules)['params']
  leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, jax.P))
  found = []
  for spec, leaf in zip(leaves, jax.tree.leaves(shapes), strict=True):
    entries = [(e,) if isinstance(e, str) else e for e in spec if e]
    axes = tuple(axis for entry in entries for axis in entry)
    found.append((math.prod(leaf.shape), axes))
  return found


def _spread(cfg: ModelConfig, where: Sharding, storage: bool) -> float:
  """Parameters on one device; gathered, if not `storage`."""
  stored = set(where.axes('model', 'expert_model')) if not storage else set()
  sizes = {axis: 1 if axis in stored else n for axis, n in where.mesh.shape.items()}
  any_remat = dataclasses.replace(cfg, remat='none')
  return sum(
    size / math.prod(sizes[axis] for axis in axes)
    for size, axes in _leaves(any_remat, where.rules)
  )


def _layer_bytes(cfg: ModelConfig, where: Sharding, itemsize: int) -> float:
  """Bytes of one block's gathered weights on a device."""
  more = dataclasses.replace(cfg, num_layers=2, num_mtp_modules=0)
  one = dataclasses.replace(more, num_layers=1)
  return itemsize * (_spread(more, where, False) - _spread(one, where, False))


def _state_bytes(config: PlanConfig | None, cfg, where: Sharding) -> float:
  """Bytes of parameters and Adam's moments, or of served weights."""
  if config is None:
    return np.dtype(jax.numpy.dtype(cfg.param_dtype)).itemsize * _spread(
      cfg, where, True
    )
  return 3 * 4 * _spread(cfg, where, True)


def _cache_bytes(cfg: ModelConfig, placed: Placed, where: Sharding) -> float:
  load = placed.workload
  rows = max(load.rows // where.size('rows'), 1)
  heads = cfg.num_kv_heads // where.size('heads')
  positions = load.context + load.new_tokens
  return 2.0 * 2 * cfg.num_layers * rows * heads * positions * cfg.head_dim


def _group(where: Sharding, topology: Topology, logical: tuple[str, ...]):
  """Coordinates of the devices in the first group along these axes of the mesh."""
  axes = where.axes(*logical) if logical != ('data',) else ('data',)
  grid = _grid(topology, tuple(where.mesh.shape.values()))
  picked = tuple(slice(None) if a in axes else 0 for a in MESH_AXES)
  return [tuple(d.coords) for d in np.ravel(grid[picked])]


@functools.lru_cache(maxsize=512)
def _grid(topology: Topology, sizes: tuple[int, ...]):
  config = MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True)))
  return sharding_lib.make_mesh(config, topology.devices).devices
