"""Shapes, costs and peers of each op that benchmarks/kernels.py measures.

Axes: B rows, S tokens, T flat tokens, N query heads, K key/value heads, H head dim,
D model or input, F output or expert hidden, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import config
from m2jax.kernels import grouped_matmul, qk_norm_rope, token_logprobs, tree_attention
from m2jax.kernels.grouped_matmul import reference as matmul_reference
from m2jax.moe import by_expert, experts

M2 = config.m2()


@dataclasses.dataclass(frozen=True)
class Op:
  """An op and its cases.

  Attributes:
    name: of the op.
    cases: platform → name of the case → shape.
    make: make(**shape) returns the arrays of the op, then a cotangent of its output.
    ours: m2jax's implementation, a function of the arrays.
    reference: the op's reference implementation.
    peers: peers(platform, **shape) returns other implementations by name.
    cost: cost(arrays, both) returns operations and bytes; `both` includes gradients.
    wrt: gradients are with respect to the first `wrt` arrays.
    small: replaces sizes of a shape so that float64 is fast.
  """

  name: str
  cases: dict[str, dict[str, dict]]
  make: Callable
  ours: Callable
  reference: Callable
  peers: Callable
  cost: Callable
  wrt: int
  small: dict


def _arrays(dtype, *shapes, seed=0):
  rng = np.random.default_rng(seed)
  return [jnp.array(rng.standard_normal(s, np.float32), dtype) for s in shapes]


def _bytes(*arrays):
  return sum(x.nbytes for x in arrays)


# --- tree_attention


def tree(kind: str, length: int) -> np.ndarray:
  """subtree_end [S] of a 'chain', 8 'documents', or a 'star' with 15 answers."""
  if kind == 'chain':
    return np.full(length, length, np.int32)
  parts = 8 if kind == 'documents' else 16
  part = -(-length // parts)
  end = np.minimum((np.arange(length) // part + 1) * part, length).astype(np.int32)
  if kind == 'star':  # all answers share the first part, the prompt
    end[:part] = length
  return end


def visible_pairs(end: np.ndarray) -> int:
  """Number of visible query-key pairs of rows [B, S]."""
  return int(np.sum(np.maximum(end - np.arange(end.shape[1]), 0)))


def _attention_make(rows, length, heads, kv_heads, dim, kind, dtype):
  q, k, v, weight = _arrays(
    dtype,
    *((rows, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)),
  )
  return [q, k, v, jnp.array(np.tile(tree(kind, length), (rows, 1))), weight]


def _attention(q, k, v, end, implementation=None):
  seen = tree_attention.Visibility(end)
  return tree_attention.attend(q, k, v, seen, implementation=implementation)


def _attention_cost(arrays, both):
  q, k, v, end, _ = arrays
  matmuls = 6 if both else 2
  flops = 2 * matmuls * visible_pairs(np.asarray(end)) * q.shape[2] * q.shape[3]
  forward = _bytes(q, k, v, q)
  return flops, forward + (_bytes(q, k, v, q, q, q, k, v) if both else 0)


def _dense(q, k, v, end):
  """jax.nn's attention with a dense mask."""
  at = jnp.arange(q.shape[1])
  seen = (at[None, None] <= at[None, :, None]) & (at[None, :, None] < end[:, None])
  return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])


def _cudnn(q, k, v, end):
  del end
  return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')


def _splash(q, k, v, end):
  """Splash attention, which supports documents (as segments) but no other tree."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as mask,
  )

  rows, length, heads, dim = q.shape
  block = min(512, length)
  names = ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute', 'q_dq')
  sizes = splash.BlockSizes(**{f'block_{n}': block for n in (*names, 'kv_dq')})
  causal = mask.MultiHeadMask(
    [mask.CausalMask((length, length))] * (heads // k.shape[2])
  )
  kernel = splash.make_splash_mqa_single_device(causal, block_sizes=sizes)
  q = q.reshape(rows, length, k.shape[2], -1, dim).transpose(0, 2, 3, 1, 4)
  k, v = (x.swapaxes(1, 2) for x in (k, v))
  run = jax.vmap(kernel, in_axes=(0, 0, 0, None))
  segments = jax.vmap(lambda e: splash.SegmentIds(e, e))(end)
  out = jax.vmap(run)(q * dim**-0.5, k, v, segments)
  return out.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, dim)


def _tokamax_attention(q, k, v, end):
  import tokamax

  at = jnp.arange(q.shape[1])
  seen = (at[None, None] <= at[None, :, None]) & (at[None, :, None] < end[:, None])
  return tokamax.dot_product_attention(q, k, v, mask=seen[:, None])


def _attention_peers(platform, *, kind, **_):
  peers = {'jax.nn, dense mask': _dense, 'tokamax, dense mask': _tokamax_attention}
  if platform == 'tpu' and kind != 'star':
    peers['splash attention'] = _splash
  if platform == 'gpu' and kind == 'chain':
    peers['cuDNN'] = _cudnn
  return peers


_SMALL_M2 = dict(rows=8, length=512, heads=8, kv_heads=2, dim=32, dtype=jnp.float32)
_LARGE_M2 = dict(
  rows=2,
  length=8192,
  heads=M2.num_heads,
  kv_heads=M2.num_kv_heads,
  dim=M2.head_dim,
  dtype=jnp.bfloat16,
)
ATTENTION = Op(
  name='tree_attention',
  cases={
    'cpu': {
      'small M2, 8 x 512': dict(_SMALL_M2, kind='chain'),
      'documents, 1 x 2048': dict(_SMALL_M2, rows=1, length=2048, kind='documents'),
      'star, 1 x 2048': dict(_SMALL_M2, rows=1, length=2048, kind='star'),
    },
    'accelerator': {
      'M2, 2 x 8192': dict(_LARGE_M2, kind='chain'),
      'M2, documents, 2 x 8192': dict(_LARGE_M2, kind='documents'),
      'M2, star, 2 x 8192': dict(_LARGE_M2, kind='star'),
    },
  },
  make=_attention_make,
  ours=_attention,
  reference=functools.partial(_attention, implementation='reference'),
  peers=_attention_peers,
  cost=_attention_cost,
  wrt=3,
  small=dict(rows=1, length=512),
)


# --- grouped_matmul


def _matmul_make(rows, inner, outer, groups, dtype):
  lhs, rhs, weight = _arrays(
    dtype, (rows, inner), (groups, inner, outer), (rows, outer)
  )
  # loads of a nearly balanced router; a tenth of the rows is padding
  share = np.random.default_rng(1).dirichlet(np.full(groups, 8.0))
  sizes = np.floor(share * 0.9 * rows).astype(np.int32)
  return [lhs / inner**0.5, rhs, jnp.array(sizes), weight]


def _matmul_cost(arrays, both):
  lhs, rhs, sizes, weight = arrays
  flops = 2 * int(sizes.sum()) * rhs.shape[1] * rhs.shape[2]
  forward = _bytes(lhs, rhs, weight)
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


# --- experts


def _experts_make(tokens, width, hidden, num_experts, top_k, dtype):
  x, weight, gate, up, down = _arrays(
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
  forward = _bytes(x, gate, up, down, weight)
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


# --- qk_norm_rope


def _norm_make(tokens, heads, dim, rotary, dtype):
  x, weight = _arrays(dtype, *((tokens, heads * dim),) * 2)
  (scale,) = _arrays(jnp.float32, (heads * dim,))
  angle = np.random.default_rng(1).uniform(0, 7, (tokens, rotary // 2))
  cos, sin = (jnp.array(f(angle), jnp.float32) for f in (np.cos, np.sin))
  return [x, scale, cos, sin, jnp.array(heads), weight]


def _norm(x, scale, cos, sin, heads, implementation=None):
  del heads
  dim = 128 if x.shape[1] % 128 == 0 and cos.shape[1] > 16 else 32
  run = functools.partial(qk_norm_rope.norm_rope, head_dim=dim, eps=1e-6)
  return run(x, scale, cos, sin, implementation=implementation)


def _norm_cost(arrays, both):
  x = arrays[0]
  return 10 * x.size * (2 if both else 1), _bytes(x) * (5 if both else 2)


NORM_ROPE = Op(
  name='qk_norm_rope',
  cases={
    'cpu': {
      'small M2, 4096': dict(
        tokens=4096, heads=8, dim=32, rotary=16, dtype=jnp.float32
      ),
    },
    'accelerator': {
      'M2 queries, 32768': dict(
        tokens=32768, heads=48, dim=128, rotary=64, dtype=jnp.bfloat16
      ),
      'M2 keys, 32768': dict(
        tokens=32768, heads=8, dim=128, rotary=64, dtype=jnp.bfloat16
      ),
    },
  },
  make=_norm_make,
  ours=_norm,
  reference=functools.partial(_norm, implementation='reference'),
  peers=lambda platform, **_: (
    {}
    if platform == 'cpu'
    else {'XLA': functools.partial(_norm, implementation='reference')}
  ),
  cost=_norm_cost,
  wrt=2,
  small=dict(tokens=64),
)


# --- token_logprobs


def _logprobs_make(tokens, width, words, dtype):
  hidden, weight = _arrays(dtype, (tokens, width), (tokens,))
  (head,) = _arrays(jnp.float32, (width, words), seed=1)
  targets = np.random.default_rng(2).integers(0, words, tokens)
  return [hidden, head / width**0.5, jnp.array(targets, jnp.int32), weight]


def _plain_logprobs(hidden, head, targets):
  """All logits at once."""
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  logits = jnp.matmul(hidden.astype(dtype), head.astype(dtype), precision='highest')
  return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]


def _logprobs_cost(arrays, both):
  hidden, head, _, _ = arrays
  flops = 2 * hidden.size * head.shape[1]
  size = _bytes(hidden, head)
  return flops * (3 if both else 1), size * (3 if both else 1)


LOGPROBS = Op(
  name='token_logprobs',
  cases={
    'cpu': {
      'small M2, 4096 x 512': dict(
        tokens=4096, width=256, words=512, dtype=jnp.float32
      ),
    },
    'accelerator': {
      'an eighth of M2, 8192 x 25008': dict(
        tokens=8192, width=M2.embed_dim, words=M2.vocab_size // 8, dtype=jnp.bfloat16
      ),
    },
  },
  make=_logprobs_make,
  ours=lambda *a: token_logprobs.token_logprobs(*a)[0],
  reference=_plain_logprobs,
  peers=lambda platform, **_: {'XLA, all logits': _plain_logprobs},
  cost=_logprobs_cost,
  wrt=2,
  small=dict(tokens=64, width=256, words=512),
)

OPS = {op.name: op for op in (ATTENTION, MATMUL, EXPERTS, NORM_ROPE, LOGPROBS)}
