"""SwiGLU experts on a CPU: loops over tiles of tokens of one expert.

Σ_k w_k · (silu(x·gate_k) ⊙ x·up_k)·down_k, as in `experts`. The assignments of each
expert are divided into tiles. A tile gathers its tokens, runs all three matmuls, so
that the activations between them stay in the cache, and adds to its tokens' results.
There are two sizes of tiles: large ones are full, and the remaining assignments of an
expert go to small ones, because matmuls of many rows are faster, but empty rows cost as
much as full ones. An empty row computes an arbitrary token with weight 0. The backward
pass has such loops, written out. An expert without tokens has no tile, so the cost does
not grow with E.

Axes: T tokens, D model, E experts, k experts of a token, F expert hidden; n tiles of b
rows; R rows of all tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Int
from m2jax.kernels import invariant
from m2jax.moe import by_expert

_TILE_ROWS = 256, 64  # large and small


class _Tiles(NamedTuple):
  """The tiles of one size and the assignment of each of their rows.

  Attributes:
    count: tiles in use; the others have no row.
    expert: [n] of each tile.
    token: [n, b] of each row; unspecified for empty rows.
    assignment: [n, b] of each row, in the order of ids [T, k]; T·k for empty rows.
  """

  count: jax.Array
  expert: jax.Array
  token: jax.Array
  assignment: jax.Array


class _Inputs(NamedTuple):
  """Everything with a gradient: x [T, D], weights [T, k], and the experts' matrices."""

  x: jax.Array
  weights: jax.Array
  gate: jax.Array
  up: jax.Array
  down: jax.Array


def _sizes(rows: int, experts: int) -> list[int]:
  """Rows of a tile, large to small: at most an expert's average number of rows."""
  most = 1 << max(3, (rows // experts).bit_length() - 1)
  return sorted({min(b, most) for b in _TILE_ROWS}, reverse=True)


def _tiles_of_size(order, start, count, b: int, n: int, top_k: int) -> _Tiles:
  """At most n tiles of b rows for entries start … start + count - 1 of `order`.

  start, count: [E], the entries of each expert.
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


def _make_tiles(ids, experts: int) -> list[_Tiles]:
  """Tiles by size, large to small; assignments with an id of E are in none."""
  order, _, sizes = by_expert.order(ids, experts)
  start = jnp.cumsum(sizes) - sizes
  done, tiles = jnp.zeros_like(sizes), []
  *larger, smallest = _sizes(ids.size, experts)
  for b in (*larger, smallest):
    n, count = ids.size // b, (sizes - done) // b * b
    if b == smallest:  # the remainder, with partial tiles
      n, count = n + experts, sizes - done
      if larger:
        n = min(n, experts * (larger[-1] // b))
    tiles.append(_tiles_of_size(order, start + done, count, b, n, ids.shape[1]))
    done += count
  return tiles


def _item(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _add_item(x, value, i):
  return jax.lax.dynamic_update_index_in_dim(x, _item(x, i) + value, i, 0)


def _gather(x, tokens):
  return x.at[tokens].get(mode='promise_in_bounds')


def _scatter_add(x, value, tokens):
  return x.at[tokens].add(value, mode='promise_in_bounds')


def _get_rows(x, start, b):
  return jax.lax.dynamic_slice_in_dim(x, start, b)


def _set_rows(x, value, start):
  return jax.lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), start, 0)


def _over_tiles(tiles, body, state):
  """state = body(first row, expert, tokens, state) for every tile, large ones first."""
  before = 0
  for size in tiles:
    n, b = size.token.shape

    def one(i, state, size=size, b=b, before=before):
      return body(before + i * b, size.expert[i], size.token[i], state)

    state = jax.lax.fori_loop(0, size.count, one, state)
    before += n * b
  return state


def _row_assignments(tiles):
  """[R]: the assignment of each row of all tiles."""
  return jnp.concatenate([size.assignment.reshape(-1) for size in tiles])


def _row_weights(weights, tiles):
  """[R]: the weight of each row; 0 for empty rows."""
  return jnp.append(weights.reshape(-1), 0)[_row_assignments(tiles)]


def _dot(spec, a, b):
  dtype = jnp.promote_types(a.dtype, jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _outer(a, b):
  """aᵀ·b, transposed apart: XLA's matmuls are fastest with contiguous operands."""
  return _dot('db,bf->df', jax.lax.optimization_barrier(a.T), b)


def _gate_up(inputs: _Inputs, i):
  """[D, 2F]: the two matrices that are multiplied by the token."""
  return jnp.concatenate([_item(inputs.gate, i), _item(inputs.up, i)], axis=1)


def _forward(inputs: _Inputs, tiles):
  """out [T, D] and, for the backward pass, x·[gate, up] [R, 2F]."""
  x, hidden = inputs.x, inputs.gate.shape[2]
  row_weights = _row_weights(inputs.weights, tiles)

  def body(first, e, tokens, state):
    out, middle = state
    both = _dot('bd,df->bf', _gather(x, tokens), _gate_up(inputs, e))
    both = both.astype(x.dtype)
    h = jax.nn.silu(both[:, :hidden]) * both[:, hidden:]
    w = _get_rows(row_weights, first, len(tokens))[:, None]
    y = _dot('bf,fd->bd', h, _item(inputs.down, e)) * w
    return _scatter_add(out, y, tokens), _set_rows(middle, both, first)

  out = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
  middle = jnp.zeros((len(row_weights), 2 * hidden), x.dtype)
  out, middle = _over_tiles(tiles, body, (out, middle))
  return out.astype(x.dtype), middle


def _backward(inputs: _Inputs, tiles, middle, d_out) -> _Inputs:
  """Cotangents of the inputs."""
  x, weights, _, _, down = inputs
  hidden, row_weights = inputs.gate.shape[2], _row_weights(weights, tiles)
  dtype = jnp.promote_types(x.dtype, jnp.float32)

  def body(first, e, tokens, state):
    d_x, d_row_weights, d_gate, d_up, d_down = state
    b = len(tokens)
    d_y, w = _gather(d_out, tokens), _get_rows(row_weights, first, b)
    w = w.astype(dtype)[:, None]
    d_h = _dot('bd,fd->bf', d_y, _item(down, e))  # not yet times w
    both = _get_rows(middle, first, b).astype(dtype)
    g, u = both[:, :hidden], both[:, hidden:]
    s = jax.nn.sigmoid(g)
    h = g * s * u
    d_w = jnp.sum(h * d_h, axis=1)
    d_h = d_h * w
    d_g = d_h * u * (s + g * s * (1 - s))
    d_both = jnp.concatenate([d_g, d_h * g * s], axis=1).astype(x.dtype)
    d_gate_up = _outer(_gather(x, tokens), d_both)
    d_gate = _add_item(d_gate, d_gate_up[:, :hidden], e)
    d_up = _add_item(d_up, d_gate_up[:, hidden:], e)
    d_down = _add_item(d_down, _outer((h * w).astype(x.dtype), d_y), e)
    update = _dot('bf,df->bd', d_both, _gate_up(inputs, e))
    d_x = _scatter_add(d_x, update, tokens)
    return d_x, _set_rows(d_row_weights, d_w, first), d_gate, d_up, d_down

  sums = [jnp.zeros(a.shape, dtype) for a in inputs]
  sums[1] = jnp.zeros(row_weights.shape, dtype)
  d_x, d_row_weights, *d_matrices = _over_tiles(tiles, body, tuple(sums))
  d_weights = jnp.zeros(weights.size + 1, dtype)
  d_weights = d_weights.at[_row_assignments(tiles)].set(d_row_weights)
  grads = d_x, d_weights[:-1].reshape(weights.shape), *d_matrices
  return _Inputs(*(g.astype(a.dtype) for g, a in zip(grads, inputs, strict=True)))


@jax.custom_vjp
def _experts(inputs: _Inputs, tiles):
  return _forward(inputs, tiles)[0]


def _fwd(inputs, tiles):
  out, middle = _forward(inputs, tiles)
  return out, (inputs, tiles, middle)


def _bwd(residuals, d_out):
  return _backward(*residuals, d_out), None


_experts.defvjp(_fwd, _bwd)


def experts(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'E D F'],
  up: Float[Array, 'E D F'],
  down: Float[Array, 'E F D'],
) -> Float[Array, 'T D']:
  """Same contract as `experts.apply`."""
  inputs = _Inputs(x, weights, gate, up, down)
  return _experts(inputs, _make_tiles(ids, gate.shape[0]))


def each(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'E D F'],
  up: Float[Array, 'E D F'],
  down: Float[Array, 'E F D'],
) -> Float[Array, 'T k D']:
  """w_k · expert_k(x), at least fp32; 0 for an id of E. No gradient.

  In tiles of one size: the same numbers whatever the other tokens (`invariant`).
  """
  inputs, E = _Inputs(x, weights, gate, up, down), len(gate)
  order, _, sizes = by_expert.order(ids, E)
  n = ids.size // invariant.TILE + E
  start = jnp.cumsum(sizes) - sizes
  tiles = _tiles_of_size(order, start, sizes, invariant.TILE, n, ids.shape[1])
  row_weights = _row_weights(weights, [tiles])

  def expert(x, w, gate, up, down):
    gate, up = (_dot('bd,df->bf', x, m).astype(x.dtype) for m in (gate, up))
    return _dot('bf,fd->bd', jax.nn.silu(gate) * up, down) * w[:, None]

  def body(first, e, tokens, rows):
    matrices = (_item(m, e) for m in inputs[2:])
    w = _get_rows(row_weights, first, len(tokens))
    y = expert(*jax.lax.optimization_barrier((_gather(x, tokens), w, *matrices)))
    return _set_rows(rows, jax.lax.optimization_barrier(y), first)

  wide = jnp.promote_types(x.dtype, jnp.float32)
  rows = jnp.zeros((len(row_weights), x.shape[1]), wide)
  rows = _over_tiles([tiles], body, rows)
  numbers = jnp.arange(len(rows), dtype=jnp.int32)
  place = jnp.zeros(ids.size, jnp.int32)
  place = place.at[_row_assignments([tiles])].set(numbers, mode='drop')
  return jnp.where((ids < E)[..., None], rows[place].reshape(*ids.shape, -1), 0)
