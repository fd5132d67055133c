"""SwiGLU experts on a CPU without gradients: batched matmuls over all experts.

Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k, as in `experts`, for the rollout engine.
Every expert gets room for C of its tokens, and three batched matmuls read its matrices
where they are; a loop over tiles (`tiled`) copies them out first, which for few tokens
is most of the time. The assignments beyond C, if an expert has more, go to `tiled`.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden, C rows of an
expert; n blocks of b tokens; columns 2·E·F, rows E·F of the dense form.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Float32, Int
from m2jax.moe import tiled

_ROWS = 8  # C is a multiple
_BLOCK = 64


def worthwhile(tokens: int, top_k: int, experts: int) -> bool:
  """Whether most experts have a token."""
  return experts <= 2 * tokens * top_k


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
  place = _places(ids, E)
  inside = (place < rows) & (ids < E)
  slot = ids * rows + place
  token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], ids.shape)
  at = jnp.where(inside, slot, E * rows)
  tokens = jnp.zeros(E * rows, jnp.int32).at[at].set(token, mode='drop')
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  dot = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=dtype)
  take = lambda x, at: x.at[at].get(mode='promise_in_bounds')
  ordered = take(x, tokens).reshape(E, rows, -1)
  h = jax.nn.silu(dot('ecd,edf->ecf', ordered, gate))
  h = (h * dot('ecd,edf->ecf', ordered, up)).astype(x.dtype)
  y = dot('ecf,efd->ecd', h, down).reshape(E * rows, -1)
  y = take(y, jnp.where(inside, slot, 0))  # [T, k, D]
  scale = jnp.where(inside, weights, 0).astype(dtype)
  out = jnp.sum(y * scale[..., None], axis=1).astype(x.dtype)
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
  """C: what random routing rarely exceeds, 2.8 deviations; no more than there are."""
  average = tokens * top_k / experts
  rows = min(math.ceil(average + 2.8 * math.sqrt(average)), tokens)
  return -(-rows // _ROWS) * _ROWS


def _places(ids: Int[Array, 'T k'], experts: int) -> Int[Array, 'T k']:
  """The number of earlier assignments of each one's expert."""
  T = len(ids)
  chosen = jnp.sum(ids[..., None] == jnp.arange(experts), axis=1, dtype=jnp.float32)
  blocks = -(-T // _BLOCK)
  size = min(T, _BLOCK)
  padded = jnp.pad(chosen, ((0, blocks * size - T), (0, 0)))
  chosen = padded.reshape(blocks, size, experts)
  # Products of counts are exact, and much faster than cumsum on a CPU.
  inside = jnp.einsum('ij,nje->nie', _below(size), chosen)
  before = _below(blocks) @ jnp.sum(chosen, axis=1)
  before = (inside + before[:, None]).reshape(-1, experts)[:T].astype(jnp.int32)
  repeats = jnp.tril(ids[:, :, None] == ids[:, None, :], -1).sum(-1)
  return jnp.take_along_axis(before, jnp.minimum(ids, experts - 1), axis=1) + repeats


def _below(n: int) -> Float32[Array, 'n n']:
  return jnp.tril(jnp.ones((n, n), jnp.float32), -1)
