"""SwiGLU experts on a CPU: loops over tiles of tokens of one expert.

Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k, as in `experts`. An expert's assignments are
cut into tiles; a tile gathers its tokens and runs all three matmuls, so that what lies
between them stays in the cache, and no matmul has to mask or to sort rows. Large tiles
are full, what remains of an expert goes into small ones: matmuls of many rows are
faster, and rows that hold nothing cost as much as others. The backward pass is such
loops again, written out. Experts without tokens have no tile, so the cost does not grow
with E.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden; n tiles of b
rows; R rows of all tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.moe import by_expert

_TILE_ROWS = 128, 32  # large and small


class _Tiles(NamedTuple):
  """Tiles of one size: who sits where.

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


def _sizes(rows: int, experts: int) -> list[int]:
  """Rows of a tile, large to small: no more than what an expert has on average."""
  most = 1 << max(3, (rows // experts).bit_length() - 1)
  return sorted({min(b, most) for b in _TILE_ROWS}, reverse=True)


def _cut(order, start, count, b: int, n: int, top_k: int) -> tuple[_Tiles, jax.Array]:
  """Tiles of b rows, n at most, for `count` [E] of each expert's entries of `order`.

  Those of an expert begin at `start` [E]. Also returns the first tile [E] of each.
  """
  rows = len(order)
  ends = jnp.cumsum(-(-count // b))
  firsts = ends + (-count // b)
  tile = jnp.arange(n)
  expert = jnp.sum(tile[:, None] >= ends, axis=1)
  expert = jnp.minimum(expert, len(count) - 1)
  at = (tile - firsts[expert]) * b
  at = at[:, None] + jnp.arange(b)
  live = (at < count[expert][:, None]) & (tile < ends[-1])[:, None]
  at = jnp.minimum(start[expert][:, None] + at, rows - 1)
  assignment = jnp.where(live, order[at], rows)
  return _Tiles(ends[-1], expert, assignment // top_k, assignment), firsts


def _tiles(ids, experts: int) -> tuple[list[_Tiles], jax.Array]:
  """Tiles by size, and the row [T, k] of each assignment; R is that of an id of E."""
  tokens, top_k = ids.shape
  order, rank, sizes = by_expert.order(ids, experts)
  start = jnp.cumsum(sizes) - sizes
  mine = jnp.minimum(ids.reshape(-1), experts - 1)
  rank = rank - start[mine]  # among those of the same expert
  done, place = jnp.zeros_like(sizes), jnp.zeros_like(rank)
  found, before = [], 0
  *larger, smallest = _sizes(len(rank), experts)
  for b in (*larger, smallest):
    n, count = len(rank) // b, (sizes - done) // b * b
    if b == smallest:  # whatever is left, cut short
      n, count = n + experts, sizes - done
      if larger:
        n = min(n, experts * (larger[-1] // b))
    tiles, firsts = _cut(order, start + done, count, b, n, top_k)
    row = before + firsts[mine] * b + rank - done[mine]
    place = jnp.where(rank < done[mine], place, row)
    found.append(tiles)
    done, before = done + count, before + n * b
  place = jnp.where(ids.reshape(-1) < experts, place, before)
  return found, place.reshape(tokens, top_k)


def _slice(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _take(x, tokens):
  return x.at[tokens].get(mode='promise_in_bounds')


def _rows(x, at, b):
  return jax.lax.dynamic_slice_in_dim(x, at, b)


def _put(x, value, at):
  return jax.lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), at, 0)


def _each(tiles, tile, state):
  """state = tile(at, expert, tokens, state) for every tile, large ones first."""
  before = 0
  for size in tiles:
    n, b = size.token.shape

    def one(i, state, size=size, b=b, before=before):
      return tile(before + i * b, size.expert[i], size.token[i], state)

    state = jax.lax.fori_loop(0, size.count, one, state)
    before += n * b
  return state


def _flat(tiles):
  """[R]: the assignment of each row."""
  return jnp.concatenate([size.assignment.reshape(-1) for size in tiles])


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
  """Σ_k w_k · rows[place_k]: [R, D], [T, k] → [T, D]."""
  out = 0
  for k in range(place.shape[1]):
    picked = jnp.take(rows, place[:, k], axis=0, mode='fill', fill_value=0)
    out += picked if weights is None else picked * weights[:, k, None]
  return out


def _forward(x, weights, gate, up, down, tiles, place):
  """out [T, D] and, for the backward pass, x·[gate, up] [R, 2F]."""
  hidden, total = gate.shape[2], len(_flat(tiles))
  padded = _pad(x)

  def tile(at, e, tokens, state):
    middle, rows = state
    both = _dot('bd,df->bf', _take(padded, tokens), _first(gate, up, e))
    both = both.astype(x.dtype)
    h = jax.nn.silu(both[:, :hidden]) * both[:, hidden:]
    y = _dot('bf,fd->bd', h, _slice(down, e))
    return _put(middle, both, at), _put(rows, y, at)

  middle = jnp.zeros((total, 2 * hidden), x.dtype)
  rows = jnp.zeros((total, x.shape[1]), x.dtype)
  middle, rows = _each(tiles, tile, (middle, rows))
  return _combine(rows, place, weights.astype(x.dtype)), middle


def _backward(x, weights, gate, up, down, tiles, place, middle, d_out):
  """Cotangents of x, weights, gate, up, down."""
  hidden, total = gate.shape[2], len(middle)
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  padded, d_padded = _pad(x), _pad(d_out)
  share = jnp.append(weights.reshape(-1), 0)[_flat(tiles)]  # [R]

  def tile(at, e, tokens, state):
    d_gate, d_up, d_down, d_rows, d_share = state
    b = len(tokens)
    d_y, w = _take(d_padded, tokens), _rows(share, at, b).astype(dtype)[:, None]
    d_h = _dot('bd,fd->bf', d_y, _slice(down, e))  # not yet times w
    both = _rows(middle, at, b).astype(dtype)
    g, u = both[:, :hidden], both[:, hidden:]
    s = jax.nn.sigmoid(g)
    h = g * s * u
    d_w = jnp.sum(h * d_h, axis=1)
    d_h = d_h * w
    d_g = d_h * u * (s + g * s * (1 - s))
    d_both = jnp.concatenate([d_g, d_h * g * s], axis=1).astype(x.dtype)
    d_first = _outer(_take(padded, tokens), d_both)
    d_gate = _add(d_gate, d_first[:, :hidden], e)
    d_up = _add(d_up, d_first[:, hidden:], e)
    d_down = _add(d_down, _outer((h * w).astype(x.dtype), d_y), e)
    d_x = _dot('bf,df->bd', d_both, _first(gate, up, e))
    return d_gate, d_up, d_down, _put(d_rows, d_x, at), _put(d_share, d_w, at)

  state = (
    *(jnp.zeros(kernel.shape, dtype) for kernel in (gate, up, down)),
    jnp.zeros((total, x.shape[1]), x.dtype),
    jnp.zeros(total, dtype),
  )
  d_gate, d_up, d_down, d_rows, d_share = _each(tiles, tile, state)
  d_weights = jnp.take(d_share, place, mode='fill', fill_value=0)
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
