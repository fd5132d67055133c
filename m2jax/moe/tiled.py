"""SwiGLU experts on a CPU: loops over tiles of tokens of one expert.

Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k, as in `experts`. An expert's assignments are
cut into tiles; a tile gathers its tokens, runs all three matmuls, so that what lies
between them stays in the cache, and adds to its tokens' results. Large tiles are full,
what remains of an expert goes into small ones: matmuls of many rows are faster, and
rows that hold nothing cost as much as others. These take some token with a weight of 0.
The backward pass is such loops again, written out. Experts without tokens have no tile,
so the cost does not grow with E.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden; n tiles of b
rows; R rows of all tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.moe import by_expert

_TILE_ROWS = 256, 64  # large and small


class _Tiles(NamedTuple):
  """Tiles of one size: who sits where.

  Attributes:
    count: tiles that have a row; the rest have none.
    expert: [n] of each tile.
    token: [n, b] of each row; any where there is none.
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


def _cut(order, start, count, b: int, n: int, top_k: int) -> _Tiles:
  """Tiles of b rows, n at most, for `count` [E] of each expert's entries of `order`.

  Those of an expert begin at `start` [E].
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
  assignment = order[jnp.minimum(start[expert][:, None] + at, rows - 1)]
  return _Tiles(
    ends[-1], expert, assignment // top_k, jnp.where(live, assignment, rows)
  )


def _tiles(ids, experts: int) -> list[_Tiles]:
  """Tiles by size; an id of E has no place in any."""
  order, _, sizes = by_expert.order(ids, experts)
  start = jnp.cumsum(sizes) - sizes
  done, found = jnp.zeros_like(sizes), []
  *larger, smallest = _sizes(ids.size, experts)
  for b in (*larger, smallest):
    n, count = ids.size // b, (sizes - done) // b * b
    if b == smallest:  # whatever is left, cut short
      n, count = n + experts, sizes - done
      if larger:
        n = min(n, experts * (larger[-1] // b))
    found.append(_cut(order, start + done, count, b, n, ids.shape[1]))
    done += count
  return found


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


def _shares(weights, tiles):
  """[R]: the weight of each row; 0 where there is none."""
  return jnp.append(weights.reshape(-1), 0)[_flat(tiles)]


def _forward(x, weights, gate, up, down, tiles):
  """out [T, D] and, for the backward pass, x·[gate, up] [R, 2F]."""
  hidden, share = gate.shape[2], _shares(weights, tiles)

  def tile(at, e, tokens, state):
    out, middle = state
    both = _dot('bd,df->bf', _take(x, tokens), _first(gate, up, e))
    both = both.astype(x.dtype)
    h = jax.nn.silu(both[:, :hidden]) * both[:, hidden:]
    y = _dot('bf,fd->bd', h, _slice(down, e)) * _rows(share, at, len(tokens))[:, None]
    return _sum(out, y, tokens), _put(middle, both, at)

  out = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
  middle = jnp.zeros((len(share), 2 * hidden), x.dtype)
  out, middle = _each(tiles, tile, (out, middle))
  return out.astype(x.dtype), middle


def _backward(x, weights, gate, up, down, tiles, middle, d_out):
  """Cotangents of x, weights, gate, up, down."""
  hidden, share = gate.shape[2], _shares(weights, tiles)
  dtype = jnp.promote_types(x.dtype, jnp.float32)

  def tile(at, e, tokens, state):
    d_x, d_share, d_gate, d_up, d_down = state
    b = len(tokens)
    d_y, w = _take(d_out, tokens), _rows(share, at, b).astype(dtype)[:, None]
    d_h = _dot('bd,fd->bf', d_y, _slice(down, e))  # not yet times w
    both = _rows(middle, at, b).astype(dtype)
    g, u = both[:, :hidden], both[:, hidden:]
    s = jax.nn.sigmoid(g)
    h = g * s * u
    d_w = jnp.sum(h * d_h, axis=1)
    d_h = d_h * w
    d_g = d_h * u * (s + g * s * (1 - s))
    d_both = jnp.concatenate([d_g, d_h * g * s], axis=1).astype(x.dtype)
    d_first = _outer(_take(x, tokens), d_both)
    d_gate = _add(d_gate, d_first[:, :hidden], e)
    d_up = _add(d_up, d_first[:, hidden:], e)
    d_down = _add(d_down, _outer((h * w).astype(x.dtype), d_y), e)
    d_x = _sum(d_x, _dot('bf,df->bd', d_both, _first(gate, up, e)), tokens)
    return d_x, _put(d_share, d_w, at), d_gate, d_up, d_down

  shapes = x.shape, share.shape, gate.shape, up.shape, down.shape
  state = tuple(jnp.zeros(shape, dtype) for shape in shapes)
  d_x, d_share, *d_kernels = _each(tiles, tile, state)
  d_weights = jnp.zeros(weights.size + 1, dtype).at[_flat(tiles)].set(d_share)
  grads = d_x, d_weights[:-1].reshape(weights.shape), *d_kernels
  inputs = x, weights, gate, up, down
  return tuple(g.astype(like.dtype) for g, like in zip(grads, inputs, strict=True))


def _outer(a, b):
  """aᵀ·b. XLA's matmuls are fastest with operands as they lie: a is turned apart."""
  return _dot('db,bf->df', jax.lax.optimization_barrier(a.T), b)


def _sum(x, value, at):
  return x.at[at].add(value, mode='promise_in_bounds')


def _add(x, value, i):
  return jax.lax.dynamic_update_index_in_dim(x, _slice(x, i) + value, i, 0)


@jax.custom_vjp
def _experts(x, weights, gate, up, down, tiles):
  return _forward(x, weights, gate, up, down, tiles)[0]


def _fwd(*arrays):
  out, middle = _forward(*arrays)
  return out, (*arrays, middle)


def _bwd(residuals, d_out):
  return *_backward(*residuals, d_out), None


_experts.defvjp(_fwd, _bwd)


def experts(x, ids, weights, gate, up, down):
  """Same contract as `experts.apply`."""
  return _experts(x, weights, gate, up, down, _tiles(ids, gate.shape[0]))
