"""Shapes, costs and peers of the grouped matmul and of the experts.

Axes: T flat tokens, D model or input, F output or expert hidden, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.op import Op, arrays_of, bytes_of
from m2jax import config
from m2jax.kernels import grouped_matmul
from m2jax.kernels.grouped_matmul import reference as matmul_reference
from m2jax.moe import by_expert, experts

M2 = config.m2()


def _matmul_make(rows, inner, outer, groups, dtype):
  lhs, rhs, weight = arrays_of(
    dtype, (rows, inner), (groups, inner, outer), (rows, outer)
  )
  # loads of a nearly balanced router; a tenth of the rows is padding
  share = np.random.default_rng(1).dirichlet(np.full(groups, 8.0))
  sizes = np.floor(share * 0.9 * rows).astype(np.int32)
  return [lhs / inner**0.5, rhs, jnp.array(sizes), weight]


def _matmul_cost(arrays, both):
  lhs, rhs, sizes, weight = arrays
  flops = 2 * int(sizes.sum()) * rhs.shape[1] * rhs.shape[2]
  forward = bytes_of(lhs, rhs, weight)
  return flops * (3 if both else 1), forward * (3 if both else 1)


def _megablox(lhs, rhs, sizes):
  from jax.experimental.pallas.ops.tpu.megablox import gmm

  live = (jnp.arange(len(lhs)) < jnp.sum(sizes))[:, None]
  tiles = min(512, len(lhs)), 1024, 1024
  out = gmm(jnp.where(live, lhs, 0), rhs, sizes, lhs.dtype, tiles)
  return jnp.where(live, out, 0)  # rows past the sum are not written


def _tokamax_matmul(lhs, rhs, sizes):
  import tokamax

  return tokamax.ragged_dot(lhs, rhs, sizes)


def _matmul_peers(platform, **_):
  peers = {'lax.ragged_dot': jax.lax.ragged_dot, 'tokamax': _tokamax_matmul}
  return peers | ({'megablox': _megablox} if platform == 'tpu' else {})


_M2_MATMUL = dict(inner=M2.embed_dim, outer=M2.expert_dim, dtype=jnp.bfloat16)
MATMUL = Op(
  name='grouped_matmul',
  cases={
    'cpu': {},  # no job calls it there
    'accelerator': {
      'M2, 32 experts': dict(_M2_MATMUL, rows=32768, groups=32),
      'M2, 256 experts': dict(_M2_MATMUL, rows=32768, groups=256),
      'M2, 32 experts, 256 rows': dict(_M2_MATMUL, rows=256, groups=32),
    },
  },
  make=_matmul_make,
  ours=grouped_matmul.matmul,
  reference=matmul_reference.matmul,
  peers=_matmul_peers,
  cost=_matmul_cost,
  wrt=2,
  small=dict(rows=256, inner=256, outer=128, groups=8),
)


def _experts_make(tokens, width, hidden, num_experts, top_k, dtype):
  x, weight, gate, up, down = arrays_of(
    dtype,
    *((tokens, width),) * 2,
    *((num_experts, width, hidden),) * 2,
    (num_experts, hidden, width),
  )
  rng = np.random.default_rng(1)
  shares = jnp.array(rng.dirichlet(np.full(top_k, 8.0), tokens), jnp.float32)
  ids = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k]
  gate, up, down = gate / width**0.5, up / width**0.5, down / hidden**0.5
  return [x, shares, gate, up, down, jnp.array(ids, jnp.int32), weight]


def _experts(x, shares, gate, up, down, ids):
  return experts.apply(x, ids, shares, gate, up, down)


def _ragged_experts(x, shares, gate, up, down, ids):
  """`experts.grouped` with XLA's own grouped matmul."""
  top_k = ids.shape[1]
  order, place, sizes = by_expert.order(ids, len(gate))
  rows = experts.take(x, order, place.reshape(ids.shape))
  h = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes))
  h = h * jax.lax.ragged_dot(rows, up, sizes)
  out = experts.permute(jax.lax.ragged_dot(h, down, sizes), place, order)
  return jnp.einsum('tkd,tk->td', out.reshape(len(x), top_k, -1), shares)


def _all_experts(x, shares, gate, up, down, ids):
  """Every expert on every token, as one matrix of all their columns."""
  num_experts, width, hidden = gate.shape

  def columns(kernel):
    return kernel.transpose(1, 0, 2).reshape(width, num_experts * hidden)

  h = jax.nn.silu(x @ columns(gate)) * (x @ columns(up))
  chosen = jax.nn.one_hot(ids, num_experts, dtype=shares.dtype)
  share = jnp.einsum('tk,tke->te', shares, chosen).astype(x.dtype)
  h = (h.reshape(-1, num_experts, hidden) * share[:, :, None]).reshape(h.shape)
  return h @ down.reshape(num_experts * hidden, width)


def _experts_cost(arrays, both):
  x, _, gate, up, down, ids, weight = arrays
  flops = 2 * 3 * ids.size * gate.shape[1] * gate.shape[2]
  forward = bytes_of(x, gate, up, down, weight)
  return flops * (3 if both else 1), forward * (3 if both else 1)


_TINY_M2 = dict(width=128, hidden=48, num_experts=8, top_k=2, dtype=jnp.float32)
EXPERTS = Op(
  name='experts',
  cases={
    'cpu': {
      'tiny M2, 64 tokens': dict(_TINY_M2, tokens=64),
      'tiny M2, 1024 tokens': dict(_TINY_M2, tokens=1024),
      'small M2, 32 experts': dict(
        tokens=2048, width=256, hidden=128, num_experts=32, top_k=8, dtype=jnp.float32
      ),
      '256 experts': dict(
        tokens=256, width=128, hidden=128, num_experts=256, top_k=8, dtype=jnp.float32
      ),
    },
    'accelerator': {
      'M2, 32 experts': dict(
        tokens=4096,
        width=M2.embed_dim,
        hidden=M2.expert_dim,
        num_experts=32,
        top_k=M2.experts_per_token,
        dtype=jnp.bfloat16,
      ),
    },
  },
  make=_experts_make,
  ours=_experts,
  reference=_all_experts,
  peers=lambda platform, **_: (
    {'all experts': _all_experts}
    | ({'lax.ragged_dot': _ragged_experts} if platform == 'cpu' else {})
  ),
  cost=_experts_cost,
  wrt=5,
  small=dict(tokens=64, width=64),
)
