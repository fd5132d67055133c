"""One decoder block: x += Attn(norm(x)); x += MoE(norm(x)) (m2-and-forge.md §1.4.1).

A block's parameters are one dict of arrays; the model stacks them over layers. On a
mesh each device has its own tokens, heads, experts and channels (`m2jax.sharding`);
norms, router and residual stream have its part of `Rules.residual`.

Axes: T tokens of a device, Tr of its part of the residual stream, D model, N, K heads,
H head dim, E experts, F expert hidden, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from m2jax.axes import Array, Bool, Float, Float32, Int
from m2jax.config import ModelConfig
from m2jax.kernels import block_fp8
from m2jax.layers import attention
from m2jax.layers.norm import rms_norm
from m2jax.layers.taps import tap
from m2jax.moe import dispatch, router, served
from m2jax.sharding import ONE_DEVICE, Sharding


class Routing(NamedTuple):
  """The router's assignments in one block.

  Attributes:
    ids: experts used, of all tokens of the device.
    load: assignments of its part of them, counted with multiplicity; None without.
    rerouted: whether a replay uses other experts than the router would choose, for each
      token of the device; None without a replay.
  """

  ids: Int[Array, 'T k']
  load: Float32[Array, 'E'] | None
  rerouted: Bool[Array, 'T'] | None = None


def apply(
  x: Float[Array, 'Tr D'],
  p,
  bias: Float[Array, 'E'],
  cfg: ModelConfig,
  tables: attention.Tables,
  attend: Callable,
  *,
  multiplicity: Int[Array, 'Tr'] | None = None,
  replay: Int[Array, 'Tr k'] | None = None,
  sharding: Sharding = ONE_DEVICE,
) -> tuple[Float[Array, 'Tr D'], Any, Routing]:
  """The block's x, what `attend` returns besides its output, and the routing.

  Args:
    x: activations.
    p: parameters of the block.
    bias: the bias of the router's selection.
    cfg: the model.
    tables, attend: RoPE and keys of the tokens; see `attention.apply`.
    multiplicity: how often each token's assignments count; None: they are not counted.
    replay: recorded expert ids, or None.
    sharding: the mesh.
  """
  with jax.named_scope('attention'):
    y = tap('norm', rms_norm(x, p['attn_norm'], cfg.rms_norm_eps, cfg.invariant))
    out, extra = attention.apply(y, p, cfg, tables, attend, sharding)
    x = _sum(x, tap('attention output', out), cfg)
  with jax.named_scope('moe'):
    y = rms_norm(x, p['moe_norm'], cfg.rms_norm_eps, cfg.invariant)
    y = tap('second norm', y)
    ids, weights, rerouted = router.decide(
      *(y, p['router'], bias, cfg.experts_per_token, replay, cfg.router_scores),
      tiled=cfg.invariant,
    )
    ids, weights = tap('chosen experts', ids), tap('router weights', weights)
    load = None
    if multiplicity is not None:
      load = router.loads(ids, multiplicity, cfg.num_experts)
      load = jax.lax.stop_gradient(load)
    # each device routes its part: ids and weights are less to gather than to recompute
    y, ids, weights = map(sharding.gather_residual, (y, ids, weights))
    rerouted = jax.tree.map(sharding.gather_residual, rerouted)
    out = tap('experts', _experts(y, ids, weights, p, cfg, sharding))
    x = _sum(x, out, cfg)
  return x, extra, Routing(ids, load, rerouted)


def _sum(x, y, cfg: ModelConfig):
  """x + y, rounded to their dtype in every program if they have to be equal."""
  return lax.optimization_barrier(x + y) if cfg.invariant else x + y


def _experts(y, ids, weights, p, cfg: ModelConfig, sharding: Sharding):
  """What the chosen experts add to the residual stream."""
  if served.prepared(p):
    return served.apply(y, ids, weights, p, cfg, sharding)
  kernels = (
    block_fp8.operand(p[name], y.dtype, cfg.matmuls) for name in ('gate', 'up', 'down')
  )
  return dispatch.apply(
    *(y, ids, weights, *kernels),
    sharding=sharding,
    matmuls=cfg.matmuls,
    in_order=cfg.invariant,
  )
