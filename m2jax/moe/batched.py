"""SwiGLU experts for few tokens on a CPU: one batched matmul over all experts.

Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k, as in `experts`, for the rollout engine.
Every expert gets room for C of its tokens, and three batched matmuls read its matrices
where they are; a loop over tiles (`tiled`) copies them out first, which for few tokens
is most of the time. The assignments beyond C, if an expert has more, go to `tiled`.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden, C rows of an
expert; columns 2·E·F, rows E·F of the dense form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Int
from m2jax.moe import tiled

_ROWS = 8  # C is a multiple


def worthwhile(tokens: int, top_k: int, experts: int) -> bool:
  """Whether most experts have a token, but few of them many."""
  return experts <= 2 * tokens * top_k <= 32 * experts


def experts(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'E D F'],
  up: Float[Array, 'E D F'],
  down: Float[Array, 'E F D'],
) -> Float[Array, 'T D']:
  """Same contract as `experts.apply`."""
  (T, k), E = ids.shape, gate.shape[0]
  rows = _rows(T, k, E)
  chosen = ids[..., None] == jnp.arange(E)  # an id of E is in none
  count = jnp.sum(chosen, axis=1, dtype=jnp.int32)
  before = jnp.cumsum(count, axis=0) - count  # of each expert, in earlier tokens
  repeats = jnp.tril(ids[:, :, None] == ids[:, None, :], -1).sum(-1)
  place = jnp.take_along_axis(before, jnp.minimum(ids, E - 1), axis=1) + repeats
  inside = (place < rows) & (ids < E)
  slot = jnp.where(inside, ids * rows + place, E * rows)
  token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], ids.shape)
  tokens = jnp.zeros(E * rows, jnp.int32).at[slot].set(token, mode='drop')
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  dot = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=dtype)
  ordered = x[tokens].reshape(E, rows, -1)
  h = jax.nn.silu(dot('ecd,edf->ecf', ordered, gate))
  h = (h * dot('ecd,edf->ecf', ordered, up)).astype(x.dtype)
  y = dot('ecf,efd->ecd', h, down).reshape(E * rows, -1)
  y = jnp.take(y, slot, axis=0, mode='fill', fill_value=0)  # [T, k, D]
  out = jnp.einsum('tkd,tk->td', y, weights.astype(dtype)).astype(x.dtype)
  if rows >= ids.size:  # a token may have an expert more than once, in a replay
    return out
  rest = jnp.where(inside, E, ids)
  arrays = (x, rest, weights, gate, up, down)
  none = lambda x, *_: jnp.zeros_like(x)
  return out + jax.lax.cond(jnp.all(rest == E), none, tiled.experts, *arrays)


def dense(gate, up, down) -> tuple[jax.Array, jax.Array]:
  """The matrices of `all_experts`: [D, 2·E·F] and [E·F, D]."""
  D = gate.shape[1]
  columns = [m.transpose(1, 0, 2).reshape(D, -1) for m in (gate, up)]
  return jnp.concatenate(columns, axis=1), down.reshape(-1, D)


def all_experts(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate_up: Float[Array, 'D columns'],
  down: Float[Array, 'rows D'],
  num_experts: int,
) -> Float[Array, 'T D']:
  """Every expert of every token, in two plain matmuls; those not chosen count 0.

  Reads all matrices once, in order: the fastest for a few tokens of a small model.
  """
  both = jnp.split(x @ gate_up, 2, axis=1)
  chosen = ids[..., None] == jnp.arange(num_experts)
  weight = jnp.sum(jnp.where(chosen, weights[..., None], 0), axis=1)
  h = (jax.nn.silu(both[0]) * both[1]).reshape(len(x), num_experts, -1)
  return (h * weight[..., None]).reshape(len(x), -1).astype(x.dtype) @ down


def _rows(tokens: int, top_k: int, experts: int) -> int:
  """C: twice an expert's average number of tokens; no more than there are."""
  average = -(-tokens * top_k // experts)
  return -(-min(2 * average, tokens) // _ROWS) * _ROWS
