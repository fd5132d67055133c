"""SwiGLU experts on a CPU: one loop over tiles of tokens of one expert.

Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k, as in `experts`. An expert's assignments are
cut into tiles; a tile gathers its tokens and runs all three matmuls, so that what lies
between them stays in the cache, and no matmul has to mask or to sort rows. The backward
pass is one more such loop, written out. At most T·k/b + E tiles, so the cost does not
grow with E.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden; n tiles of b
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.moe import by_expert

_TILE_ROWS = 256  # matmuls of fewer rows do not fill two cores


class _Tiles(NamedTuple):
  """Who sits where.

  Attributes:
    count: tiles that have a row; the rest have none.
    expert: [n] of each tile.
    token: [n, b] of each row; T where there is none.
    assignment: [n, b] of each row, in the order of ids [T, k]; T·k where there is none.
  """

  count: jax.Array
  expert: jax.Array
  token: jax.Array
  assignment: jax.Array


def _tiles(ids, experts: int) -> tuple[_Tiles, jax.Array]:
  """Tiles, and the row [T, k] of each assignment; n·b is that of an id of E."""
  tokens, top_k = ids.shape
  order, rank, sizes = by_expert.order(ids, experts)
  ids = ids.reshape(-1)
  rows = len(ids)
  # about half a tile an expert is empty: no larger than what an expert has on average
  b = min(_TILE_ROWS, 1 << max(3, (rows // experts).bit_length() - 1))
  ends = jnp.cumsum(sizes)
  starts = ends - sizes
  tile_ends = jnp.cumsum(-(-sizes // b))
  tile_starts = tile_ends - -(-sizes // b)
  n = rows // b + experts
  tile = jnp.arange(n)
  expert = jnp.sum(tile[:, None] >= tile_ends, axis=1)
  expert = jnp.minimum(expert, experts - 1)
  at = starts[expert] + (tile - tile_starts[expert]) * b
  at = at[:, None] + jnp.arange(b)
  live = (at < ends[expert][:, None]) & (tile < tile_ends[-1])[:, None]
  assignment = jnp.where(live, order[jnp.minimum(at, rows - 1)], rows)
  where = tile_starts * b - starts
  place = jnp.where(ids < experts, where[jnp.minimum(ids, experts - 1)] + rank, n * b)
  tiles = _Tiles(tile_ends[-1], expert, assignment // top_k, assignment)
  return tiles, place.reshape(tokens, top_k)


def _slice(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _take(x, tokens):
  return x.at[tokens].get(mode='promise_in_bounds')


def _put(x, value, i):
  return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, 0)


def _dot(spec, a, b):
  dtype = jnp.promote_types(a.dtype, jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _first(gate, up, i):
  """[D, 2F]: both matrices that read the token."""
  return jnp.concatenate([_slice(gate, i), _slice(up, i)], axis=1)


def _pad(x):
  """A row of zeros, for rows of a tile that have no token."""
  return jnp.concatenate([x, jnp.zeros_like(x[:1])])


def _combine(rows, place, weights):
  """Σ_k w_k · rows[place_k]: [n, b, D], [T, k] → [T, D]."""
  rows = rows.reshape(-1, rows.shape[-1])
  out = 0
  for k in range(place.shape[1]):
    picked = jnp.take(rows, place[:, k], axis=0, mode='fill', fill_value=0)
    out += picked if weights is None else picked * weights[:, k, None]
  return out


def _forward(x, weights, gate, up, down, tiles, place):
  """out [T, D] and, for the backward pass, x·[gate, up] [n, b, 2F]."""
  n, b = tiles.token.shape
  hidden = gate.shape[2]
  padded = _pad(x)

  def tile(i, state):
    middle, rows = state
    e = tiles.expert[i]
    both = _dot('bd,df->bf', _take(padded, tiles.token[i]), _first(gate, up, e))
    both = both.astype(x.dtype)
    h = jax.nn.silu(both[:, :hidden]) * both[:, hidden:]
    y = _dot('bf,fd->bd', h, _slice(down, e))
    return _put(middle, both, i), _put(rows, y, i)

  middle = jnp.zeros((n, b, 2 * hidden), x.dtype)
  rows = jnp.zeros((n, b, x.shape[1]), x.dtype)
  middle, rows = jax.lax.fori_loop(0, tiles.count, tile, (middle, rows))
  return _combine(rows, place, weights.astype(x.dtype)), middle


def _backward(x, weights, gate, up, down, tiles, place, middle, d_out):
  """Cotangents of x, weights, gate, up, down."""
  n, b = tiles.token.shape
  hidden = gate.shape[2]
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  padded, d_padded = _pad(x), _pad(d_out)
  share = jnp.append(weights.reshape(-1), 0)[tiles.assignment]  # [n, b]

  def tile(i, state):
    d_gate, d_up, d_down, d_rows, d_share = state
    e = tiles.expert[i]
    d_y, w = _take(d_padded, tiles.token[i]), share[i].astype(dtype)[:, None]
    d_h = _dot('bd,fd->bf', d_y, _slice(down, e))  # not yet times w
    both = _slice(middle, i).astype(dtype)
    g, u = both[:, :hidden], both[:, hidden:]
    s = jax.nn.sigmoid(g)
    h = g * s * u
    d_w = jnp.sum(h * d_h, axis=1)
    d_h = d_h * w
    d_g = d_h * u * (s + g * s * (1 - s))
    d_both = jnp.concatenate([d_g, d_h * g * s], axis=1).astype(x.dtype)
    d_first = _outer(_take(padded, tiles.token[i]), d_both)
    d_gate = _add(d_gate, d_first[:, :hidden], e)
    d_up = _add(d_up, d_first[:, hidden:], e)
    d_down = _add(d_down, _outer((h * w).astype(x.dtype), d_y), e)
    d_x = _dot('bf,df->bd', d_both, _first(gate, up, e))
    return d_gate, d_up, d_down, _put(d_rows, d_x, i), _put(d_share, d_w, i)

  state = (
    *(jnp.zeros(kernel.shape, dtype) for kernel in (gate, up, down)),
    jnp.zeros((n, b, x.shape[1]), x.dtype),
    jnp.zeros((n, b), dtype),
  )
  d_gate, d_up, d_down, d_rows, d_share = jax.lax.fori_loop(0, tiles.count, tile, state)
  d_weights = jnp.take(d_share.reshape(-1), place, mode='fill', fill_value=0)
  return (
    _combine(d_rows, place, None),
    d_weights.astype(weights.dtype),
    d_gate.astype(gate.dtype),
    d_up.astype(up.dtype),
    d_down.astype(down.dtype),
  )


def _outer(a, b):
  """aᵀ·b. XLA's matmuls are fastest with operands as they lie: a is turned apart."""
  return _dot('db,bf->df', jax.lax.optimization_barrier(a.T), b)


def _add(x, value, i):
  return jax.lax.dynamic_update_index_in_dim(x, _slice(x, i) + value, i, 0)


@jax.custom_vjp
def _experts(x, weights, gate, up, down, tiles, place):
  return _forward(x, weights, gate, up, down, tiles, place)[0]


def _fwd(*arrays):
  out, middle = _forward(*arrays)
  return out, (*arrays, middle)


def _bwd(residuals, d_out):
  return *_backward(*residuals, d_out), None, None


_experts.defvjp(_fwd, _bwd)


def experts(x, ids, weights, gate, up, down):
  """Same contract as `experts.apply`."""
  tiles, place = _tiles(ids, gate.shape[0])
  return _experts(x, weights, gate, up, down, tiles, place)
