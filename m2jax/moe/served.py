"""A layer's experts in the forms that a rollout engine's calls use on a CPU.

`prepare` replaces the matrices `gate` and `up` by two forms: gate and up in one
(`batched.fused`), and one for small batches (`batched.dense` or `batched.separate`).
XLA would otherwise make them in every call.

Axes: T tokens, D model, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from m2jax.axes import Array, Float, Int
from m2jax.config import ModelConfig
from m2jax.moe import batched, dispatch
from m2jax.sharding import Sharding

FUSED, SMALL_BATCH = 'gate_up', 'small_batch'
SMALL_BATCH_TOKENS = 8


def prepare(p: Mapping[str, Any], small_batch: Callable) -> dict[str, Any]:
  """A block's parameters with both forms; `small_batch` makes the second."""
  rest = {name: x for name, x in p.items() if name not in ('gate', 'up')}
  gate, up, down = (p[name] for name in ('gate', 'up', 'down'))
  return {
    **rest,
    FUSED: batched.fused(gate, up),
    SMALL_BATCH: small_batch(gate, up, down),
  }


def prepared(p: Mapping[str, Any]) -> bool:
  """Whether the parameters of a block are `prepare`'s."""
  return SMALL_BATCH in p


def apply(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  p: Mapping[str, Any],
  cfg: ModelConfig,
  sharding: Sharding,
) -> Float[Array, '_ D']:
  """`dispatch.apply` with prepared parameters, without a gradient."""
  here = len(p['down'])

  def run(x, ids, weights):
    cast = lambda matrices: jax.tree.map(lambda m: m.astype(x.dtype), matrices)
    if len(x) > SMALL_BATCH_TOKENS:
      kernels = cast((p[FUSED], p['down']))
      return batched.experts(x, ids, weights, *kernels, cfg.num_experts)
    if isinstance(p[SMALL_BATCH][0], tuple):
      return batched.chosen_experts(x, ids, weights, *cast(p[SMALL_BATCH]))
    return batched.all_experts(x, ids, weights, *cast(p[SMALL_BATCH]), here)

  out = dispatch.gathered(run, x, ids, weights, here, sharding, together=True)
  return sharding.sum_to_residual(out, 'expert_hidden')
