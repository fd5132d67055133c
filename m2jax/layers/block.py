"""One decoder block: x += Attn(norm(x)); x += MoE(norm(x)) (m2-and-forge.md §1.4.1).

A block's parameters are one dict of arrays; the model stacks them over layers. On a
mesh each device has its own tokens, heads, experts and channels (`m2jax.sharding`).

Axes: T tokens, D model, N, K heads, H head dim, E experts, F expert hidden, k top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.config import ModelConfig
from m2jax.layers.norm import rms_norm
from m2jax.moe import dispatch, router
from m2jax.sharding import ONE_DEVICE, Sharding


class Routing(NamedTuple):
  """The router's assignments in one block.

  Attributes:
    ids: [T, k] experts used.
    load: [E] fp32 assignments of this device's tokens, counted with multiplicity.
  """

  ids: jax.Array
  load: jax.Array


def apply(
  x,
  p,
  bias,
  cfg: ModelConfig,
  attend,
  multiplicity,
  replay=None,
  sharding: Sharding = ONE_DEVICE,
):
  """x [T, D] → x [T, D], attention's extra output, Routing.

  Args:
    x: activations.
    p: parameters of the block.
    bias: [E], of the router's selection.
    cfg: the model.
    attend: (normed x, p) → ([T, D], extra): forest or cached attention.
    multiplicity: [T], by which assignments are counted.
    replay: [T, k] recorded expert ids, or None.
    sharding: the mesh.
  """
  with jax.named_scope('attention'):
    out, extra = attend(rms_norm(x, p['attn_norm'], cfg.rms_norm_eps), p)
    x = x + out
  with jax.named_scope('moe'):
    y = rms_norm(x, p['moe_norm'], cfg.rms_norm_eps)
    ids, weights = router.route(
      y, p['router'], bias, cfg.experts_per_token, replay, cfg.router_scores
    )
    kernels = (p[name].astype(x.dtype) for name in ('gate', 'up', 'down'))
    x = x + dispatch.apply(y, ids, weights, *kernels, sharding=sharding)
    load = router.loads(ids, jnp.asarray(multiplicity), cfg.num_experts)
  return x, extra, Routing(ids, jax.lax.stop_gradient(load))
