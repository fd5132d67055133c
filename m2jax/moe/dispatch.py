"""Dropless expert parallelism: experts are split over devices, tokens reach them all.

Devices along the expert axis have E/n experts each and different tokens. There are
three exact methods, for a router that may send every token to one device:

  gather  Tokens of the n devices are gathered, each device runs its own experts on
          those that chose them, and the sums are scattered back. This moves n·T·D
          numbers each way whatever the routing, with dense collectives only.
  ragged  Each device sends every device only its rows (`lax.ragged_all_to_all`), in
          rounds of bounded size (`exchange`). This moves T·k·D numbers each way.
  padded  `ragged` through a plain all-to-all, with each part padded to a round's bound:
          the same program for platforms without a ragged all-to-all. For tests.

A dropless plain all-to-all would send each token to each device at most once, in parts
padded to T rows: n·T·D numbers, the same as `gather` moves without sorting. Hence
`gather` where XLA has no ragged all-to-all (CPU), and by default everywhere but on TPU.

Axes: T tokens of a device, D model, E experts, El = E/n experts of a device, k experts
of a token, F expert hidden, n devices of the expert axis.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2jax import platforms
from m2jax.axes import Array, Float, Int
from m2jax.config import PLAIN, Matmuls
from m2jax.kernels import invariant
from m2jax.kernels.block_fp8 import Blocks
from m2jax.moe import exchange, experts, tiled
from m2jax.sharding import ONE_DEVICE, Sharding


def apply(
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  gate: Float[Array, 'El D F'] | Blocks,
  up: Float[Array, 'El D F'] | Blocks,
  down: Float[Array, 'El F D'] | Blocks,
  *,
  sharding: Sharding = ONE_DEVICE,
  matmuls: Matmuls = PLAIN,
  in_order: bool = False,
) -> Float[Array, '_ D']:
  """Σ_k w_k · expert_k(x) with experts and their hidden channels split over devices.

  Args:
    x: this device's tokens.
    ids, weights: the router's choices among all E experts.
    gate, up, down: matrices of this device's experts and hidden channels.
    sharding: the mesh; `rules.dispatch` names the method, None is 'ragged' on TPU and
      'gather' elsewhere.
    matmuls: precision of the experts' matmuls.
    in_order: a token's experts are computed in tiles of one shape, and added in the
      order of its ids, however they are split (`kernels.invariant`).

  Returns:
    In x's dtype; of this device's part of the residual stream (`Rules.residual`).
  """
  run = functools.partial(_apply, sharding, matmuls)
  if in_order:
    ordered = functools.partial(_in_order, sharding)
    run = invariant.with_gradient_of(run, ordered)
  out = run(x, ids, weights, gate, up, down)
  return sharding.sum_to_residual(out, 'expert_hidden')


def _apply(sharding: Sharding, matmuls: Matmuls, *arrays):
  if not sharding.axes('experts'):
    return experts.apply(*arrays, matmuls)
  methods = {
    'gather': functools.partial(_gather, sharding, matmuls),
    'ragged': functools.partial(
      exchange.apply, lax.ragged_all_to_all, sharding, matmuls
    ),
    'padded': functools.partial(
      exchange.apply, exchange.padded_all_to_all, sharding, matmuls
    ),
  }
  method = sharding.rules.dispatch
  if method is None:
    return platforms.dependent(
      *arrays, tpu=methods['ragged'], default=methods['gather']
    )
  return methods[method](*arrays)


def _in_order(sharding: Sharding, x, ids, weights, *kernels):
  run = lambda *tokens: tiled.each(*tokens, *kernels)
  # of each element one device has a number that is not 0: their sum is exact
  each = gathered(run, x, ids, weights, len(kernels[0]), sharding)
  columns = (each[:, i] for i in range(ids.shape[1]))
  return functools.reduce(operator.add, columns).astype(x.dtype)


def _gather(sharding: Sharding, matmuls: Matmuls, x, ids, weights, *kernels):
  run = lambda *tokens: experts.apply(*tokens, *kernels, matmuls)
  return gathered(run, x, ids, weights, len(kernels[0]), sharding)


def gathered(
  run: Callable[..., Float[Array, 'n·T D']],
  x: Float[Array, 'T D'],
  ids: Int[Array, 'T k'],
  weights: Float[Array, 'T k'],
  here: int,
  sharding: Sharding,
  *,
  together: bool = False,
) -> Float[Array, 'T D']:
  """The method `gather`, without the sum over hidden channels.

  Args:
    run: (x, ids, weights) of all n devices' tokens → what this device's experts add;
      ids count from its first expert, and `here` is an expert of another device.
    x, ids, weights: as in `apply`.
    here: El.
    sharding: the mesh.
    together: gather in one collective instead of three, which has no gradient.
  """
  axes = sharding.axes('experts')
  if not axes:
    return run(x, ids, weights)
  gather = functools.partial(lax.all_gather, axis_name=axes, tiled=True)
  if together:
    x, ids, weights = _as_bytes(gather, (x, ids, weights))
  else:
    x, ids, weights = map(gather, (x, ids, weights))
  ids = ids - sharding.index('experts') * here
  ids = jnp.where((ids >= 0) & (ids < here), ids, here)
  return lax.psum_scatter(run(x, ids, weights), axes, tiled=True)


def _as_bytes(gather: Callable, arrays: tuple[jax.Array, ...]) -> tuple:
  """`gather` of [T, …] arrays as one: few tokens cost latency rather than bandwidth.

  As unsigned integers of the narrowest type among them.
  """
  narrow = min(x.dtype.itemsize for x in arrays)
  unsigned = jnp.dtype(f'uint{8 * narrow}')
  parts = [lax.bitcast_convert_type(x, unsigned).reshape(len(x), -1) for x in arrays]
  ends = np.cumsum([part.shape[1] for part in parts])
  found = jnp.split(gather(jnp.concatenate(parts, axis=1)), ends[:-1], axis=1)

  def back(part, like):
    if like.dtype.itemsize > narrow:
      part = part.reshape(len(part), like.shape[1], -1)
    return lax.bitcast_convert_type(part, like.dtype)

  return tuple(map(back, found, arrays))
