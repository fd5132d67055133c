"""Dropless SwiGLU experts: Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k.

Three exact paths. *grouped* sorts assignments by expert and runs three grouped matmuls,
at a cost independent of E. *tiled* does the same in one loop, which a CPU is faster at.
*wide* runs every expert on every token as one matmul and weights the hidden
activations; a few small experts are faster so.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.kernels import grouped_matmul
from m2jax.moe import by_expert, tiled

# Most hidden activations of experts not chosen that are cheaper than sorting.
_WIDE_WASTE = 1 << 18


def apply(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  path: str | None = None,
) -> jax.Array:
  """x [T, D], ids, weights [T, k], gate, up [E, D, F], down [E, F, D] → [T, D].

  An id of E is an expert elsewhere: it adds nothing and gets no gradient.
  `path` is 'wide', 'grouped' or 'tiled'; None takes the fastest by size and by the
  platform lowered for.
  """
  arrays = (x, ids, weights, gate, up, down)
  if path is None:
    waste = ids.shape[0] * (gate.shape[0] - ids.shape[1]) * gate.shape[2]
    if waste > _WIDE_WASTE:
      return jax.lax.platform_dependent(*arrays, cpu=tiled.experts, default=_grouped)
    path = 'wide'
  paths = {'wide': _wide, 'grouped': _grouped, 'tiled': tiled.experts}
  return paths[path](*arrays)


def _wide(x, ids, weights, gate, up, down):
  experts, model, hidden = gate.shape

  def columns(kernel):
    return kernel.transpose(1, 0, 2).reshape(model, experts * hidden)

  h = jax.nn.silu(x @ columns(gate)) * (x @ columns(up))
  chosen = jax.nn.one_hot(ids, experts, dtype=weights.dtype)
  share = jnp.einsum('tk,tke->te', weights, chosen).astype(x.dtype)
  h = (h.reshape(-1, experts, hidden) * share[:, :, None]).reshape(h.shape)
  return h @ down.reshape(experts * hidden, model)


def _grouped(x, ids, weights, gate, up, down):
  tokens, top_k = ids.shape
  experts = gate.shape[0]
  order, place, group_sizes = by_expert.order(ids, experts)
  rows = permute(jnp.repeat(x, top_k, axis=0), order, place)
  h = jax.nn.silu(grouped_matmul.matmul(rows, gate, group_sizes))
  h = h * grouped_matmul.matmul(rows, up, group_sizes)
  out = permute(grouped_matmul.matmul(h, down, group_sizes), place, order)
  out = out.reshape(tokens, top_k, -1)
  return jnp.einsum('tkd,tk->td', out, weights.astype(x.dtype))


@jax.custom_vjp
def permute(rows, order, inverse):
  """rows[order]; the backward pass is the inverse gather, not a scatter."""
  del inverse
  return rows[order]


permute.defvjp(
  lambda rows, order, inverse: (rows[order], inverse),
  lambda inverse, d_out: (d_out[inverse], None, None),
)
