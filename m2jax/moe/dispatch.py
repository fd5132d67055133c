"""Dropless expert parallelism: experts are split over devices, tokens reach them all.

Devices along the expert axis hold E/n experts and different tokens. There are three
exact methods, for a router that may send every token to one device:

  gather  Tokens of the n devices are gathered, each device runs its own experts on
          those that chose them, and the sums are scattered back. This moves n·T·D
          numbers each way whatever the routing, with dense collectives only.
  ragged  Each device sorts its T·k assignments by expert and sends every device only
          its rows (`lax.ragged_all_to_all`), which come back the same way. This moves
          at most T·k·D numbers each way, but its buffers are of worst-case size.
  padded  `ragged` through a plain all-to-all, with each part padded to the worst case:
          the same program for platforms without a ragged all-to-all. For tests.

A dropless plain all-to-all would send each token to each device at most once, in parts
padded to T rows: n·T·D numbers, as many as `gather` moves without sorting. Hence
`gather` where XLA has no ragged all-to-all (CPU), and by default everywhere but on TPU.

Axes: T tokens of a device, D model, E experts, El = E/n experts of a device, k experts
of a token, F expert hidden, n devices of the expert axis.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float, Int
from m2jax.moe import by_expert, experts
from m2jax.sharding import ONE_DEVICE, Sharding


def apply(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'El D F'],
  up: Float[Array, 'El D F'],
  down: Float[Array, 'El F D'],
  *,
  sharding: Sharding = ONE_DEVICE,
) -> Float[Array, '_ D']:
  """Σ_k w_k · expert_k(x) with experts and their hidden channels split over devices.

  Args:
    x: this device's tokens.
    ids, weights: of all E experts.
    gate, up, down: of this device's experts and hidden channels.
    sharding: the mesh; `rules.dispatch` names the method, None is 'ragged' on TPU and
      'gather' elsewhere.

  Returns:
    In x's dtype; of this device's part of the residual stream (`Rules.residual`).
  """
  arrays = (x, ids, weights, gate, up, down)
  if not sharding.axes('experts'):
    out = experts.apply(*arrays)
  else:
    method = sharding.rules.dispatch
    methods = {
      'gather': functools.partial(_gather, sharding),
      'ragged': functools.partial(_exchange, sharding, lax.ragged_all_to_all),
      'padded': functools.partial(_exchange, sharding, padded_all_to_all),
    }
    if method is None:
      out = lax.platform_dependent(
        *arrays, tpu=methods['ragged'], default=methods['gather']
      )
    else:
      out = methods[method](*arrays)
  return sharding.sum_to_residual(out, 'expert_hidden')


def _gather(sharding: Sharding, x, ids, weights, gate, up, down):
  axes = sharding.axes('experts')
  x, ids, weights = (lax.all_gather(a, axes, tiled=True) for a in (x, ids, weights))
  here = len(gate)
  ids = ids - sharding.index('experts') * here
  ids = jnp.where((ids >= 0) & (ids < here), ids, here)
  out = experts.apply(x, ids, weights, gate, up, down)
  return lax.psum_scatter(out, axes, tiled=True)


def _exchange(sharding: Sharding, all_to_all, x, ids, weights, gate, up, down):
  axes, me = sharding.axes('experts'), sharding.index('experts')
  n, here = sharding.size('experts'), len(gate)
  tokens, top_k = ids.shape
  order, place, count = by_expert.order(ids, n * here)
  rows = experts.permute(jnp.repeat(x, top_k, axis=0), order, place)
  counts = lax.all_gather(count, axes).reshape(n, n, here)
  sizes = jnp.sum(counts, axis=-1)  # [from, to] rows
  before = jnp.cumsum(sizes, axis=0) - sizes  # [from, to] rows of lower devices
  sent, got = sizes[me], sizes[:, me]
  send = functools.partial(
    all_to_all,
    input_offsets=jnp.cumsum(sent) - sent,
    send_sizes=sent,
    output_offsets=before[me],
    recv_sizes=got,
    axis_name=axes,
  )
  sender = jnp.cumsum(sizes, axis=1) - sizes  # [from, to] first row at the sender
  send_back = functools.partial(
    all_to_all,
    input_offsets=jnp.cumsum(got) - got,
    send_sizes=got,
    output_offsets=sender[:, me],
    recv_sizes=sent,
    axis_name=axes,
  )
  # A token's experts differ, so at most El of its k rows come here.
  most = n * tokens * min(top_k, here)
  received = send(rows, jnp.zeros((most, x.shape[1]), x.dtype))
  expert = jnp.repeat(
    jnp.tile(jnp.arange(here), n), counts[:, me].reshape(-1), total_repeat_length=most
  )
  expert = jnp.where(jnp.arange(most) < jnp.sum(got), expert, here)
  ones = jnp.ones((most, 1), x.dtype)
  out = experts.apply(received, expert[:, None], ones, gate, up, down)
  out = send_back(out, jnp.zeros_like(rows))
  out = experts.permute(out, place, order).reshape(tokens, top_k, -1)
  return jnp.einsum('tkd,tk->td', out, weights.astype(x.dtype))


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
