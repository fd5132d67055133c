"""SwiGLU experts on a CPU without gradients: batched matmuls over all experts.

Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k, as in `experts`, for the rollout engine.
Every expert has space for C of its tokens, and two batched matmuls read its matrices in
place; a loop over tiles (`tiled`) would first copy them, which takes most of the time
for few tokens. Such a loop computes the assignments beyond C, if an expert has more.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden, C rows of an
expert; n blocks of b tokens; columns 2·F, and 2·E·F × E·F of the dense form.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float, Float32, Int

_ROWS = 8  # C is a multiple
_BLOCK = 64


def fused(gate: Float[Array, 'E D F'], up: Float[Array, 'E D F']) -> jax.Array:
  """The first matrices of `experts`, [E, D, 2F]: one matmul instead of two."""
  return jnp.concatenate([gate, up], axis=2)


def experts(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate_up: Float[Array, 'E D columns'],
  down: Float[Array, 'E F D'],
  num_experts: int | None = None,
) -> Float[Array, 'T D']:
  """Same contract as `experts.apply`, with `fused` matrices.

  Args:
    num_experts: number of experts of the layer, if E counts only this device's.
  """
  (T, k), E = ids.shape, len(down)
  rows = _rows(T, k, num_experts or E)
  place = _places(ids, E)
  inside = (place < rows) & (ids < E)
  slot = ids * rows + place
  at = jnp.where(inside, slot, E * rows)
  token = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], ids.shape)
  tokens = jnp.zeros(E * rows, jnp.int32).at[at].set(token, mode='drop')
  ordered = _take(x, tokens).reshape(E, rows, -1)
  y = _swiglu(ordered, gate_up, down).reshape(E * rows, -1)
  y = _take(y, jnp.where(inside, slot, 0))  # [T, k, D]
  scale = jnp.where(inside, weights, 0).astype(y.dtype)
  out = jnp.sum(y * scale[..., None], axis=1)
  out = _add_rest(out, rows, x, ids, place, weights, gate_up, down)
  return out.astype(x.dtype)


def _add_rest(out, rows: int, x, ids, place, weights, gate_up, down):
  """Adds the assignments beyond `rows` of an expert, `rows` of one at a time."""
  E = len(down)
  tile = jnp.where(ids < E, place // rows, 0).astype(jnp.int32)  # 0: done
  tiles = jnp.zeros(E, jnp.int32).at[ids].max(tile, mode='drop')
  ends = jnp.cumsum(tiles)
  token = jnp.broadcast_to(jnp.arange(len(x), dtype=jnp.int32)[:, None], ids.shape)

  def one(i, out):
    expert = jnp.sum(i >= ends)
    number = i - (ends - tiles)[expert] + 1
    mine = (ids == expert) & (tile == number)
    at = jnp.where(mine, place % rows, rows)
    fill = lambda x: jnp.zeros(rows, x.dtype).at[at].set(x, mode='drop')
    tokens = fill(token)
    kernels = (lax.dynamic_slice_in_dim(m, expert, 1) for m in (gate_up, down))
    y = _swiglu(_take(x, tokens)[None], *kernels)[0]
    y *= fill(weights)[:, None].astype(y.dtype)
    return out.at[tokens].add(y, mode='promise_in_bounds')

  return lax.fori_loop(0, ends[-1], one, out)


def _swiglu(x: Float[Array, 'E C D'], gate_up, down) -> Float[Array, 'E C D']:
  """Each expert's tokens through its matrices; at least fp32."""
  dtype, F = jnp.promote_types(x.dtype, jnp.float32), down.shape[1]
  dot = lambda a, b: jnp.einsum('ecd,edf->ecf', a, b, preferred_element_type=dtype)
  h = dot(x, gate_up)
  return dot((jax.nn.silu(h[..., :F]) * h[..., F:]).astype(x.dtype), down)


def _take(x, at):
  return x.at[at].get(mode='promise_in_bounds')


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

  Reads all matrices once, in order: for a few tokens of a small model, on a device
  that has all cores.
  """
  both = jnp.split(x @ gate_up, 2, axis=1)
  weight = _weight_of(ids, weights, num_experts)
  h = (jax.nn.silu(both[0]) * both[1]).reshape(len(x), num_experts, -1)
  return (h * weight[..., None]).reshape(len(x), -1).astype(x.dtype) @ down


def separate(gate, up, down) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """The matrices of `chosen_experts`: E of [1, D, 2F] and E of [1, F, D]."""
  each = lambda x: tuple(x[e : e + 1] for e in range(len(x)))
  return each(fused(gate, up)), each(down)


def chosen_experts(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate_up: tuple[Float[Array, '1 D columns'], ...],
  down: tuple[Float[Array, '1 F D'], ...],
) -> Float[Array, 'T D']:
  """The experts that any token has chosen, each of all tokens; reads no others.

  An array for each expert, since XLA would copy its part of a stack. One expert after
  the other, each on one thread: for a device that has one core.
  """
  weight = _weight_of(ids, weights, len(down))
  needed = jnp.any(ids[..., None] == jnp.arange(len(down)), axis=(0, 1))

  def add(out, x, weight, gate_up, down):
    gate, up = jnp.split(x @ gate_up[0], 2, axis=1)
    h = jax.nn.silu(gate) * up * weight[:, None]
    return out + h.astype(x.dtype) @ down[0]

  out = jnp.zeros_like(x)
  for e, matrices in enumerate(zip(gate_up, down, strict=True)):
    arguments = (out, x, weight[:, e], *matrices)
    out = lax.cond(needed[e], add, lambda out, *_: out, *arguments)
  return out


def _weight_of(ids, weights, num_experts: int) -> Float[Array, 'T E']:
  """Weight of each expert's output for each token; 0 if it was not chosen."""
  chosen = ids[..., None] == jnp.arange(num_experts)
  return jnp.sum(jnp.where(chosen, weights[..., None], 0), axis=1)


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
