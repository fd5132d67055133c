"""The engine on a mesh: which device stores and computes what.

No weights are gathered: heads, vocabulary and expert channels are split over `tensor`,
experts over `expert`. All other axes split the rows: each *group* of devices that
shares rows has its own slots and pages, which no other group reads. A sequence stays in
the group where it began; its host tables name pages of that group.

Axes: g groups, S slots and P rows of a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.moe import batched, served
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.contexts import Contexts
from m2jax.rollout.engine.decode_state import DecodeState, Prefix
from m2jax.rollout.engine.pages import Pages
from m2jax.sharding import PRESETS, Rules, Sharding

_ROWS = ('data', 'fsdp', 'context', 'expert')
_EVERYWHERE = PartitionSpec()


def serving(cfg: ModelConfig, sharding: Sharding) -> Sharding:
  """The mesh of `sharding` under the engine's rules, with its method of dispatch.

  Key/value heads that do not divide over `tensor` are computed on each of its devices.

  Raises:
    ValueError: the model does not divide over the mesh; names the field.
  """
  if sharding.mesh is None:
    return sharding
  rules = dataclasses.replace(
    PRESETS['serve'],
    rows=_ROWS,
    dispatch=sharding.rules.dispatch,
    exchange_factor=sharding.rules.exchange_factor,
  )
  served = Sharding(sharding.mesh, rules)
  if cfg.num_kv_heads % served.size('heads'):
    served = Sharding(sharding.mesh, dataclasses.replace(rules, heads=None))
  served.check(cfg)
  return served


def small_batch_form(cfg: ModelConfig, config: EngineConfig, sharding: Sharding):
  """The form of experts for small batches on a CPU, as in `forward.split_layers`.

  None in block FP8, whose matrices stay as they are.
  """
  if 'block_fp8' in (config.weights_dtype, cfg.matmuls.kind):
    return None
  return batched.separate if sharding.size('experts') > 1 else batched.dense


def weight_specs(
  cfg: ModelConfig,
  rules: Rules,
  *,
  small_batch: Callable | None = None,
  modules: bool = False,
) -> dict[str, Any]:
  """PartitionSpecs of the weights as the calls take them (`forward.split_layers`)."""
  specs = sharding_lib.param_specs(cfg, rules)
  if not cfg.unroll_layers:
    return specs
  experts, hidden = rules.mesh_axes('experts'), rules.mesh_axes('expert_hidden')
  if small_batch is batched.separate:  # one expert of each device in an array
    both = PartitionSpec(experts, None, hidden), PartitionSpec(experts, hidden, None)
  else:
    together = (*experts, *hidden)
    both = PartitionSpec(None, together), PartitionSpec(together, None)

  def prepare(one):
    if small_batch is None:
      return one
    if 'layers' in one:
      return {**one, 'layers': prepare(one['layers'])}
    rest = {name: x for name, x in one.items() if name not in ('gate', 'up')}
    return {**rest, served.FUSED: one['gate'], served.SMALL_BATCH: both}

  def split(stacked, count: int):
    is_spec = lambda x: isinstance(x, PartitionSpec)
    one = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stacked, is_leaf=is_spec)
    return [prepare(one) if isinstance(one, dict) else one] * count

  counts = {'layers': cfg.num_layers}
  if modules:
    counts['mtp'] = cfg.num_mtp_modules
  return {
    name: {
      key: split(part, counts[key]) if key in counts else part
      for key, part in tree.items()
    }
    for name, tree in specs.items()
  }


def rows_spec(rules: Rules) -> PartitionSpec:
  """Spec of arrays whose first axis is the slots or the rows of all groups."""
  return rules.spec('rows', 'rows')


def page_specs(rules: Rules, config: EngineConfig, *, groups: bool = True) -> Pages:
  """PartitionSpecs of Pages; without `groups` every group has the same pages."""
  rows = 'rows' if groups else None
  spec = rules.spec('pages', None, 'heads', rows, None, None)
  ids = rules.spec('page experts', None, rows, None, None)
  tokens = rules.spec('page tokens', rows, None)
  states = rules.spec('page states', None, rows, None)
  modules = (states, tokens) if config.draft_tokens else (None, None)
  return Pages(spec, spec, tokens, ids if config.record_experts else None, *modules)


def state_specs(rules: Rules, config: EngineConfig) -> DecodeState:
  """PartitionSpecs of a DecodeState, a prefix of its tree."""
  return DecodeState(page_specs(rules, config), rows_spec(rules))


def context_specs(rules: Rules, config: EngineConfig) -> Contexts:
  """PartitionSpecs of Contexts, a prefix of their tree."""
  spec = rules.spec('contexts', 'heads', 'rows', None, None)
  tokens = rules.spec('context tokens', 'rows', None)
  ids = rules.spec('context experts', None, 'rows', None, None)
  return Contexts(spec, spec, tokens, ids if config.record_experts else None)


def prefix_specs(rules: Rules, config: EngineConfig) -> Prefix:
  """PartitionSpecs of a Prefix, which every group has."""
  pages = page_specs(rules, config, groups=False)
  return Prefix(pages, _EVERYWHERE, _EVERYWHERE)
