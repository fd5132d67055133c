"""Experts of other devices, reached by an all-to-all in rounds of bounded size.

Each device sorts its A assignments by expert, hence by device, and sends every device
only its rows. A router may send all tokens to one device, so a buffer for every routing
would have n·T·min(k, El) rows. Here a device's rows form a queue, by sender, and round
r exchanges rows r·C … (r + 1)·C - 1 of every queue: the rows are sent, the experts run
on them, and the results return. Rounds continue until the longest queue is empty: one
round if no device gets more than C rows, and exact for every routing. All devices
compute the number of rounds from the same counts.

The backward pass runs the same rounds and also exchanges cotangents. It recomputes the
experts of a round, so a round saves nothing.

Axes: T tokens of a device, D model, E experts, El = E/n experts of a device, k experts
of a token, A = T·k assignments, F expert hidden, n devices of the expert axis, C rows
of the buffer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from m2jax.axes import Array, Float, Int
from m2jax.config import Matmuls
from m2jax.kernels.block_fp8 import Blocks
from m2jax.moe import by_expert, experts
from m2jax.sharding import Sharding

MIN_ROWS = 1024  # of a buffer: a second round costs more than the memory of this many


def buffer_rows(
  tokens: int, top_k: int, devices: int, local_experts: int, factor: float
) -> int:
  """C: `factor` times the mean, at least MIN_ROWS, at most the worst case.

  The worst case is that all devices' tokens choose this device's experts: as a token's
  experts differ, at most `local_experts` of its assignments.
  """
  worst = devices * tokens * min(top_k, local_experts)
  return min(worst, max(math.ceil(factor * tokens * top_k), MIN_ROWS))


class _Static(NamedTuple):
  all_to_all: Callable  # as `lax.ragged_all_to_all`
  axes: tuple[str, ...]  # of the mesh: the expert axis
  rows: int  # of a buffer
  matmuls: Matmuls  # precision


class _Routing(NamedTuple):
  """A device's assignments by expert, and those of all devices.

  Attributes:
    order, place: [A] and its inverse as [T, k], from `by_expert`.
    counts: [n, n, El], assignments of each device's tokens to each expert.
  """

  order: jax.Array
  place: jax.Array
  counts: jax.Array


class _Round(NamedTuple):
  """What one round exchanges.

  Attributes:
    send, send_back: all-to-alls of rows [A, ·] into a buffer [C, ·] and back, each
      (operand, output) → output with the received rows written.
    expert: [C, 1], of a received row; El past the last.
  """

  send: Callable
  send_back: Callable
  expert: jax.Array


def _round(static: _Static, counts, number) -> _Round:
  me = lax.axis_index(static.axes)
  here = counts.shape[2]
  sizes = jnp.sum(counts, axis=2, dtype=jnp.int32)  # [from, to]
  queued = jnp.cumsum(sizes, axis=0) - sizes  # first place in the receiver's queue
  first = number * jnp.int32(static.rows)
  done = jnp.clip(first - queued, 0, sizes)
  size = jnp.clip(first + static.rows - queued, 0, sizes) - done
  at_sender = jnp.cumsum(sizes, axis=1) - sizes + done
  at_receiver = jnp.clip(queued + done - first, 0, static.rows)
  call = functools.partial(static.all_to_all, axis_name=static.axes)
  send = functools.partial(
    call,
    input_offsets=at_sender[me],
    send_sizes=size[me],
    output_offsets=at_receiver[me],
    recv_sizes=size[:, me],
  )
  send_back = functools.partial(
    call,
    input_offsets=at_receiver[:, me],
    send_sizes=size[:, me],
    output_offsets=at_sender[:, me],
    recv_sizes=size[me],
  )
  ends = jnp.cumsum(counts[:, me].reshape(-1))  # of the queue's runs of one expert
  at = first + jnp.arange(static.rows, dtype=jnp.int32)
  run = jnp.sum(ends <= at[:, None], axis=1, dtype=jnp.int32)
  expert = jnp.where(at < ends[-1], run % here, here)
  return _Round(send, send_back, expert[:, None])


def _over_rounds(static: _Static, counts, body, state):
  """state = body(_Round, state) until every queue is empty."""
  longest = jnp.max(jnp.sum(counts, axis=(0, 2), dtype=jnp.int32))
  return lax.fori_loop(
    jnp.int32(0),
    -(-longest // static.rows),
    lambda number, state: body(_round(static, counts, number), state),
    state,
  )


def _received(static: _Static, part: _Round, rows):
  return part.send(rows, jnp.zeros((static.rows, rows.shape[1]), rows.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(static: _Static, x, weights, matrices, routing: _Routing):
  order, place, counts = routing
  rows = experts.take(x, order, place)
  ones = jnp.ones((static.rows, 1), weights.dtype)

  def body(part, out):
    received = _received(static, part, rows)
    y = experts.apply(received, part.expert, ones, *matrices, static.matmuls)
    return part.send_back(y, out)

  out = _over_rounds(static, counts, body, jnp.zeros_like(rows))
  return jnp.einsum('tkd,tk->td', out[place], weights.astype(x.dtype))


def _fwd(static, *arrays):
  return _experts(static, *arrays), arrays


def _bwd(static, residuals, d_out):
  """Weights are applied at the receiver, so that its results need not return."""
  x, weights, matrices, routing = residuals
  order, place, counts = routing
  sent = (
    experts.take(x, order, place),
    weights.reshape(-1, 1)[order],
    experts.take(d_out, order, place),
  )

  def body(part, state):
    d_rows, d_weights, d_matrices = state
    rows, w, d_y = (_received(static, part, a) for a in sent)
    run = lambda rows, w, *m: experts.apply(rows, part.expert, w, *m, static.matmuls)
    _, vjp = jax.vjp(run, rows, w, *matrices)
    d_received, d_w, *more = vjp(d_y)
    return (
      part.send_back(d_received, d_rows),
      part.send_back(d_w, d_weights),
      tuple(a + b for a, b in zip(d_matrices, more, strict=True)),
    )

  zeros = jax.tree.map(jnp.zeros_like, (*sent[:2], matrices))
  d_rows, d_weights, d_matrices = _over_rounds(static, counts, body, zeros)
  d_x = jnp.sum(d_rows[place], axis=1)
  return d_x, d_weights[:, 0][place], d_matrices, None


_experts.defvjp(_fwd, _bwd)


def apply(
  all_to_all: Callable,
  sharding: Sharding,
  matmuls: Matmuls,
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'El D F'] | Blocks,
  up: Float[Array, 'El D F'] | Blocks,
  down: Float[Array, 'El F D'] | Blocks,
) -> Float[Array, 'T D']:
  """Same contract as `dispatch.apply`, without the sum over hidden channels.

  The gradients of the matrices are sums over rounds in the matrices' dtype.

  Args:
    all_to_all: `lax.ragged_all_to_all` or `padded_all_to_all`.
    sharding: its rule `exchange_factor` is C in multiples of A.
    matmuls, x, ids, weights, gate, up, down: as in `dispatch.apply`.
  """
  axes, here = sharding.axes('experts'), len(gate)
  devices = sharding.size('experts')
  order, place, count = by_expert.order(ids, devices * here)
  counts = lax.all_gather(count, axes).reshape(devices, devices, here)
  counts = checkpoint_name(counts, by_expert.NAME)
  rows = buffer_rows(*ids.shape, devices, here, sharding.rules.exchange_factor)
  static = _Static(all_to_all, axes, rows, matmuls)
  routing = _Routing(order, place.reshape(ids.shape), counts)
  return _experts(static, x, weights, (gate, up, down), routing)


def padded_all_to_all(
  operand, output, *, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name
):
  """`lax.ragged_all_to_all` with each part padded to the longest possible."""
  row = jnp.arange(min(len(operand), len(output)))
  parts = operand.at[input_offsets[:, None] + row].get(mode='fill', fill_value=0)
  parts = jnp.where((row < send_sizes[:, None])[..., None], parts, 0)
  parts = lax.all_to_all(parts, axis_name, 0, 0, tiled=True)
  at = lax.all_to_all(output_offsets, axis_name, 0, 0, tiled=True)[:, None] + row
  at = jnp.where(row < recv_sizes[:, None], at, len(output))
  return output.at[at].set(parts, mode='drop')
