"""The rollout engine: decoding over pages.

Its calls are `prefill_rows` (a chunk of several prompts at once), `admit` (a slot
starts decoding) and `generate_many` (several steps in one call; stop tokens, lengths
and early end on the device). The host decides which pages a sequence has and passes its
page table with every call. `rollout.jetstream` adds JetStream's calls, over the same
pure functions (facts/jax-anchors.md §3.2).

The functions are `calls`; on a mesh each runs as one `shard_map`, placed by
`placement`: slots, rows and pages are divided into g groups, in order. With several
processes all make the same calls, in the same order and with the same arguments.

Prefill only fills the cache: it consumes all tokens of a prompt except the last, which
the first decode step consumes. Every sampled token therefore comes from one code path,
and a prefix can be reused without logits. A position is written before it is visible;
entries at or beyond a sequence's length are undefined, but finite and never read.

All shapes are buckets of EngineConfig: after `warmup` nothing compiles.

Axes: g groups, S slots, P rows and pages of a group; n pages of a table, C chunk
tokens, N decode steps of a call, M stop ids, V vocabulary, D model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.kernels import block_fp8
from m2jax.observe import progress
from m2jax.rollout.engine import contexts, forward, placement, speculative
from m2jax.rollout.engine import pages as pages_lib
from m2jax.rollout.engine.calls import Calls
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.contexts import Contexts
from m2jax.rollout.engine.decode_state import (
  DecodeState,
  Drafted,
  Prefix,
  Sampled,
  make_slots,
)
from m2jax.sharding import ONE_DEVICE, Sharding

_EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Specs:
  """Specs of the calls' arguments and results, from `placement`.

  Attributes:
    stacked, weights: `variables` as callers have them, and as the calls need them.
    row: arrays whose first axis is of slots or rows.
  """

  stacked: Any
  weights: Any
  state: DecodeState
  prefix: Prefix
  contexts: Contexts
  row: PartitionSpec


class Engine:
  """Prefill and decoding for one model; its only state is compiled functions.

  Weights are an argument of every call (`variables` of `model.M2(cfg)`), so they may
  change between any two calls; the state is an argument too and is donated.

  Attributes:
    waits_for_tokens: whether a decode call returns only when its tokens are there.
  """

  waits_for_tokens = False

  def __init__(
    self, cfg: ModelConfig, config: EngineConfig, sharding: Sharding = ONE_DEVICE
  ):
    """Compiles nothing yet.

    Args:
      cfg: the model.
      config: sizes.
      sharding: the mesh; its rules are replaced by `placement.serving`'s.

    Raises:
      ValueError: the context is longer than the model's, or the model does not divide
        over the mesh; names the field.
    """
    _check(cfg, config)
    self.cfg = cfg
    self.sharding = placement.serving(cfg, sharding)
    self.config = config = config.of_group(self.groups)
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',))
    self._mesh = self.sharding.mesh or one
    # On a TPU or a GPU there are kernels for pages and for groups of any size.
    self._on_cpu = cfg.unroll_layers and _platform(self._mesh) == 'cpu'
    self._on_cpu &= not cfg.invariant
    small_batch = None
    if self._on_cpu:
      small_batch = placement.small_batch_form(cfg, config, self.sharding)
    specs = self._specs(small_batch)
    calls = Calls(cfg, config, self.sharding, self._on_cpu)
    self._make_weights_calls(specs, small_batch)
    self._make_calls(calls, specs)
    self._make_page_calls(calls, specs)

  def _specs(self, small_batch: int | None) -> Specs:
    """Placement of the calls' arguments and results; see `forward.prepared`."""
    config, rules = self.config, self.sharding.rules
    weights = stacked = _EVERYWHERE
    if self.sharding.mesh is not None:
      modules = config.draft_tokens > 0
      weights = placement.weight_specs(
        self.cfg, rules, small_batch=small_batch, modules=modules
      )
      stacked = sharding_lib.param_specs(self.cfg, rules)
    return Specs(
      stacked,
      weights,
      placement.state_specs(rules, config),
      placement.prefix_specs(rules, config),
      placement.context_specs(rules, config),
      placement.rows_spec(rules),
    )

  def _make_weights_calls(self, specs: Specs, small_batch: int | None) -> None:
    split = functools.partial(
      forward.prepared,
      self.cfg,
      quantize=bool(self.config.weights_dtype),
      small_batch=small_batch,
      modules=self.config.draft_tokens > 0,
    )
    self._prepare = self._jit(split, (specs.stacked,), specs.weights)
    self._new_state = jax.jit(self._empty_state, out_shardings=self._named(specs.state))

  def _make_calls(self, calls: Calls, specs: Specs) -> None:
    weights, state, kept, row = specs.weights, specs.state, specs.contexts, specs.row
    all_ = _EVERYWHERE
    self.prefill_rows = self._jit(
      calls.prefill_rows, (weights, state, *[row] * 4), state, donate=1
    )
    self.admit = self._jit(calls.admit, (state, *[row] * 3), state, donate=0)
    many = calls.generate_many, (weights, state, *[row] * 3, all_)
    self.generate_many = self._jit(*many, (state, row), donate=1, out=(state, all_))
    rows = calls.generate_kept, (weights, state, kept, *[row] * 3, all_, row)
    self.generate_kept = self._jit(
      *rows, (state, row, kept), donate=(1, 2), out=(state, all_, kept)
    )
    # One step of every slot.
    self.generate_step = self._jit(
      calls.generate_one, (weights, state), (state, row), donate=1, out=(state, all_)
    )
    # Of rows of a group and pages of a table, for `generate_kept`.
    self.new_contexts = jax.jit(
      self._empty_contexts, static_argnums=(0, 1), out_shardings=self._named(kept)
    )
    # One step of rows with a grammar: `generate_kept` or `generate_many` with a mask.
    masked, into = rows if self.keeps_contexts else many
    more, donate = ((kept,), (1, 2)) if self.keeps_contexts else ((), 1)
    self.generate_masked = self._jit(
      masked,
      (*into, row),
      (state, row, *more),
      donate=donate,
      out=(state, all_, *more),
    )
    self.speculative = {
      drafts: self._jit(
        functools.partial(speculative.generate_many, calls, drafts),
        many[1],
        (state, row, row),
        donate=1,
        out=(state, all_, all_),
      )
      for drafts in range(1, self.config.draft_tokens + 1)
    }

  def _make_page_calls(self, calls: Calls, specs: Specs) -> None:
    """Expert ids of pages; pages to and from host memory, or another engine."""
    state, pages, all_ = specs.state, specs.prefix.pages, _EVERYWHERE
    self.expert_ids = self._jit(calls.expert_ids, (state, all_, all_), all_)
    self.read_pages = self._jit(calls.read_pages, (state, all_, all_), pages)
    self.write_pages = self._jit(
      calls.write_pages, (state, all_, all_, pages), state, donate=0
    )

  @property
  def groups(self) -> int:
    """g, of devices that share rows; see `placement`."""
    return self.sharding.size('rows')

  @property
  def keeps_contexts(self) -> bool:
    """Whether decode calls are `generate_kept`: on a CPU, without drafts."""
    return self._on_cpu and not self.config.draft_tokens and self.moves_pages

  @property
  def moves_pages(self) -> bool:
    """Whether `read_pages` gives this process whole pages."""
    return not self._mesh.is_multi_process

  def _jit(self, f: Callable, arguments, results, *, donate=None, out=None):
    """A function of `Calls`, compiled for the specs of its arguments and results.

    Args:
      donate: positions of the state, and of Contexts.
      out: specs that the results get, if others: what the host reads goes everywhere.
    """

    def call(*args):
      return self.sharding.shard_map(f, arguments, results)(*args)

    call.__name__ = getattr(f, 'func', f).__name__
    # Without out_shardings a second call may compile again.
    places = self._named(results if out is None else out)
    return jax.jit(call, donate_argnums=donate, out_shardings=places)

  def _named(self, specs):
    return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)

  def state_shapes(self) -> DecodeState:
    """Shapes and shardings of the state, for compilation without data."""
    specs = placement.state_specs(self.sharding.rules, self.config)
    return self.sharding.shaped(jax.eval_shape(self._empty_state), specs)

  def _empty_pages(self, pages: int) -> pages_lib.Pages:
    config = self.config
    return pages_lib.empty(
      self.cfg,
      pages,
      config.page_tokens,
      config.cache_dtype,
      record_experts=config.record_experts,
      modules=config.draft_tokens,
    )

  def _empty_state(self) -> DecodeState:
    config = self.config
    slots = make_slots(self.groups * config.slots, config)
    pages = self._empty_pages(self.groups * config.pages)
    return DecodeState(pages, jax.tree.map(jnp.asarray, slots))

  def _empty_contexts(self, rows: int, n: int) -> Contexts:
    pages = jax.eval_shape(lambda: self._empty_pages(self.config.pages))
    return contexts.empty(pages, self.groups * rows, n, self.cfg.num_layers)

  def speculate(
    self, params, state: DecodeState, drafts: int, *arrays
  ) -> tuple[DecodeState, Sampled, Drafted]:
    """`generate_many` with drafts, 1 … config.draft_tokens; see `speculative`."""
    return self.speculative[int(drafts)](params, state, *arrays)

  def init_decode_state(self) -> DecodeState:
    """All slots empty."""
    return self._new_state()

  def load_params(self, params):
    """Places weights as the calls need them; skips those already placed.

    Arrays may be placed for another mesh of the same devices, or be of numpy. Programs
    are compiled for a placement: every set of weights must pass through here, or its
    first call compiles again. With several processes all must call it.
    """
    *_, placed = self.load_parts(params)
    return placed

  def load_parts(self, params, part_bytes: int = 2**62) -> Iterator[Any]:
    """`load_params` in parts: gives None after each, and at last the weights.

    Args:
      part_bytes: a part ends with the array that reaches this size.
    """
    in_blocks = block_fp8.are_blocks(params)
    if in_blocks and not self.config.weights_dtype:
      raise ValueError(
        "EngineConfig.weights_dtype=None: set 'block_fp8', as these weights are"
      )
    leaves, structure = jax.tree.flatten(params)
    everywhere = self._named(_EVERYWHERE)
    specs = [_EVERYWHERE] * len(leaves)
    if self.sharding.mesh is not None:
      specs = sharding_lib.param_specs(self.cfg, self.sharding.rules)
      specs = jax.tree.leaves(jax.tree.broadcast(specs, params))
    since = 0
    for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
      if self.sharding.mesh is not None:
        leaves[i] = self.sharding.place(leaf, spec)
      else:
        leaves[i] = jax.device_put(leaf, everywhere)
      since += leaf.nbytes
      if since >= part_bytes:
        since = 0
        yield None
    params = structure.unflatten(leaves)
    ready = not self.cfg.unroll_layers and bool(self.config.weights_dtype) == in_blocks
    yield params if ready else self._prepare(params)

  @property
  def loads_in_any_thread(self) -> bool:
    """Whether weights may be loaded while another thread calls the engine."""
    return self.sharding.mesh is None

  # --- Compilation.

  def warmup(self, params, state: DecodeState) -> DecodeState:
    """Compiles every shape that the scheduler uses; returns an equivalent state.

    All rows are padding, so that no visible entry changes.
    """
    config, g = self.config, self.groups
    rows = lambda *shape: np.zeros((g * shape[0], *shape[1:]), np.int32)
    each = 1 + config.grammars + len(self.speculative)
    shapes = len(config.decode_rows) * each + len(config.prefill_shapes)
    report = progress.counted(
      'compiling the engine', len(config.table_sizes) * shapes + 1
    )
    for n in config.table_sizes:
      for size in config.decode_rows:
        report()
        tables = rows(size, n)
        none = rows(size), rows(1), tables, np.int32(0)
        if self.keeps_contexts:
          kept, stale = self.new_contexts(size, n), np.zeros(g * size, bool)
          state, *_ = self.generate_kept(params, state, kept, *none, stale)
        else:
          state, _ = self.generate_many(params, state, *none)
        if config.grammars:
          report()
          state = self._warm_masked(params, state, size, n, none)
        for drafts in self.speculative:
          report()
          state, *_ = self.speculate(params, state, drafts, *none)
      for size, chunk in config.prefill_shapes:
        report()
        tokens, tables = rows(size, chunk), rows(size, n)
        state = self.prefill_rows(params, state, tokens, rows(size), rows(size), tables)
      if config.record_experts:
        self.expert_ids(state, np.int32(0), np.zeros(n, np.int32))
    report()
    empty = make_slots(g * config.slots, config)
    state = self.admit(state, rows(config.slots), rows(1), empty)
    jax.block_until_ready(state)
    progress.report('')
    return state

  def _warm_masked(self, params, state, size: int, n: int, none) -> DecodeState:
    rows = self.groups * size
    mask = np.full((rows, -(-self.cfg.vocab_size // 32)), -1, np.int32)
    if self.keeps_contexts:
      kept, stale = self.new_contexts(size, n), np.zeros(rows, bool)
      return self.generate_masked(params, state, kept, *none, stale, mask)[0]
    return self.generate_masked(params, state, *none, mask)[0]

  def compilations(self) -> int:
    """Number of programs compiled so far for the scheduler's calls."""
    calls = (self.prefill_rows, self.generate_many, self.admit, self.expert_ids)
    calls += tuple(self.speculative.values())
    calls += (self.read_pages, self.write_pages)
    calls += (self.generate_kept, self.generate_masked, self.new_contexts)
    return sum(call._cache_size() for call in calls)


def _check(cfg: ModelConfig, config: EngineConfig) -> None:
  """Raises ValueError for sizes that the model does not have."""
  if config.context_tokens > cfg.max_positions:
    raise ValueError(
      f'EngineConfig.context_tokens={config.context_tokens} exceeds '
      f'ModelConfig.max_positions={cfg.max_positions}'
    )
  for field in ('cache_dtype', 'weights_dtype'):
    if cfg.invariant and (stored := getattr(config, field)) is not None:
      raise ValueError(
        f'EngineConfig.{field}={stored!r}: must be None with '
        "ModelConfig.numerics='invariant': the learner rounds to the model's dtypes"
      )
  if config.draft_tokens > cfg.num_mtp_modules:
    raise ValueError(
      f'EngineConfig.draft_tokens={config.draft_tokens} exceeds '
      f'ModelConfig.num_mtp_modules={cfg.num_mtp_modules}: each draft is of a module '
      'of its own; `train.expand_mtp` adds modules'
    )


def _platform(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
  """The platform of the mesh's devices; an abstract mesh has the default's."""
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return jax.default_backend()
  return mesh.devices.flat[0].platform
