"""Dropless SwiGLU experts: Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k.

One implementation per platform, exact for every routing, whose matmuls cost the same
for every E: `tiled` on a CPU, elsewhere `grouped`, which sorts assignments by expert
and runs three grouped matmuls. In low precision all platforms run `grouped`.

Axes: T tokens, D model, E experts, k experts of a token, A = T·k assignments,
F expert hidden.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from m2jax import platforms
from m2jax.axes import Array, Float, Int, Shaped
from m2jax.config import PLAIN, Matmuls
from m2jax.kernels import block_fp8
from m2jax.kernels.block_fp8 import Blocks
from m2jax.moe import by_expert, tiled


def apply(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'E D F'] | Blocks,
  up: Float[Array, 'E D F'] | Blocks,
  down: Float[Array, 'E F D'] | Blocks,
  matmuls: Matmuls = PLAIN,
) -> Float[Array, 'T D']:
  """Σ_k w_k · expert_k(x): `tiled.experts` for a CPU target, else `grouped`.

  An id of E is an expert of another device: it adds nothing and gets no gradient.
  """
  arrays = (x, ids, weights, gate, up, down)
  if matmuls != PLAIN:
    return grouped(*arrays, matmuls)
  return platforms.dependent(*arrays, cpu=tiled.experts, default=grouped)


def grouped(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'E D F'] | Blocks,
  up: Float[Array, 'E D F'] | Blocks,
  down: Float[Array, 'E F D'] | Blocks,
  matmuls: Matmuls = PLAIN,
) -> Float[Array, 'T D']:
  """Same contract as `apply`: grouped matmuls over assignments sorted by expert."""
  tokens, top_k = ids.shape
  experts = gate.shape[0]
  order, place, group_sizes = by_expert.order(ids, experts)
  rows = take(x, order, place.reshape(ids.shape))
  times = functools.partial(block_fp8.grouped, group_sizes=group_sizes, matmuls=matmuls)
  h = jax.nn.silu(times(rows, gate)) * times(rows, up)
  out = permute(times(h, down), place, order)
  out = out.reshape(tokens, top_k, -1)
  return jnp.einsum('tkd,tk->td', out, weights.astype(x.dtype))


@jax.custom_vjp
def take(
  x: Shaped[Array, 'T D'], order: Int[Array, 'A'], place: Int[Array, 'T k']
) -> Shaped[Array, 'A D']:
  """The tokens of assignments in `order`, whose inverse is `place`.

  The backward pass is a gather and a sum over k, not a scatter.
  """
  return x[order // place.shape[1]]


take.defvjp(
  lambda x, order, place: (take(x, order, place), place),
  lambda place, d_rows: (jnp.sum(d_rows[place], axis=1), None, None),
)


@jax.custom_vjp
def permute(
  rows: Shaped[Array, 'A D'], order: Int[Array, 'A'], inverse: Int[Array, 'A']
) -> Shaped[Array, 'A D']:
  """rows[order]; the backward pass is the inverse gather, not a scatter."""
  del inverse
  return rows[order]


permute.defvjp(
  lambda rows, order, inverse: (rows[order], inverse),
  lambda inverse, d_out: (d_out[inverse], None, None),
)
