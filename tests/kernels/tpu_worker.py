"""Compiles kernels, with their gradients, for one v5p chip that need not be there.

python -m tests.kernels.tpu_worker CASE…    (of CASES; needs libtpu)

Prints JSON, one line a case: bytes of arguments, outputs and temporaries in HBM, and
how many Mosaic kernels the program calls. That it compiles at all says that they fit
VMEM and scalar memory.
"""

from __future__ import annotations

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from m2jax import config
from m2jax.kernels import (
  grouped_matmul,
  paged_attention,
  qk_norm_rope,
  tree_attention,
)
from m2jax.kernels.token_logprobs import token_logprobs, top_k_logprobs
from m2jax.rollout.engine.pages import Pages

M2 = config.m2()

# [B, Q, S], shards of the heads, and what differs
ATTENTION = {
  'attention 4k': ((1, 4096, 4096), 1, {}),
  'attention 4k, 16 rows': ((16, 4096, 4096), 1, {}),
  'attention 32k': ((1, 32768, 32768), 1, {}),
  'attention 192k': ((1, 196608, 196608), 1, {}),
  'attention 192k, a quarter of the queries': ((1, 49152, 196608), 1, {}),
  'attention 192k, 2 rows': ((2, 196608, 196608), 4, {}),
  'attention 4k, one key head': ((4, 4096, 4096), 8, {}),
  'attention 192k, one key head': ((1, 196608, 196608), 8, {}),
  'attention 4k, window': ((1, 4096, 4096), 1, dict(window=1024, sinks=4)),
  'attention 4001, fp32': ((1, 4001, 4001), 4, dict(dtype=jnp.float32)),
}
# rows, experts, and what differs
MATMUL = {
  'matmul 256 experts': (32768, 256, {}),
  'matmul 256 experts, down': (32768, 256, dict(down=True)),
  'matmul 32 experts': (32768, 32, {}),
  'matmul 32 experts, half the columns': (32768, 32, dict(shards=2)),
  'matmul 32 experts, down, half the rows': (32768, 32, dict(down=True, shards=2)),
  'matmul 32 experts, 8 rows': (8, 32, {}),
  'matmul 32 experts, fp32': (32768, 32, dict(dtype=jnp.float32)),
}
# tokens, heads, and what differs
NORM_ROPE = {
  'norm and rope of 32k queries': (32768, M2.num_heads, {}),
  'norm and rope of 32k keys': (32768, M2.num_kv_heads, {}),
  'norm and rope of a share of queries': (32768, M2.num_heads // 8, dict(split=True)),
  'norm and rope of 4001 queries, fp32': (
    4001,
    M2.num_heads,
    dict(dtype=jnp.float32),
  ),
}
# tokens, shards of the vocabulary, words of the top-K KL or None
LOGPROBS = {
  'logprobs of 32k tokens': (32768, 1, {}),
  'logprobs of 32k tokens, an eighth of the words': (32768, 8, {}),
  'top-20 KL of 32k tokens, an eighth of the words': (32768, 8, dict(k=20)),
}
# [P, C], positions of a row, tokens of a page, shards of the heads, and what differs
PAGED = {
  'paged decode 32k': ((32, 1), 32768, 64, 8, {}),
  'paged decode 32k, all heads': ((32, 1), 32768, 128, 1, {}),
  'paged decode 192k': ((16, 1), 196608, 64, 8, {}),
  'paged decode 192k, small pages, more than one table': ((32, 1), 196608, 16, 8, {}),
  'paged decode 32k, fp32': ((32, 1), 32768, 16, 8, dict(dtype=jnp.float32)),
  'paged tree of 4': ((32, 4), 32768, 64, 8, dict(tree=True)),
  'paged prefill 192k': ((2, 2048), 196608, 64, 8, {}),
  'paged prefill 32k, all heads': ((2, 512), 32768, 32, 1, {}),
  'paged prefill 32k, fp32': ((2, 500), 32768, 16, 4, dict(dtype=jnp.float32)),
}
# as the engine calls it: layers in a loop, each written before it is read
LAYERS = {
  'paged layers, decode': ((32, 1), 32768, 128, 4, {}),
  'paged layers, decode, one key head': ((32, 1), 32768, 64, 8, {}),
  'paged layers, prefill': ((8, 512), 196608, 128, 8, {}),
}
MAKERS = {
  'attention': ATTENTION,
  'matmul': MATMUL,
  'norm_rope': NORM_ROPE,
  'logprobs': LOGPROBS,
  'paged': PAGED,
  'layers': LAYERS,
}
CASES = tuple(name for cases in MAKERS.values() for name in cases)
# a row that blocks do not divide is padded; rows too long for one table go one by one
COPIED = ('attention 192k, 2 rows', 'attention 4001, fp32')


def attention(shape, shards, *, dtype=jnp.bfloat16, window=None, sinks=0):
  """q, k and v come and go as a projection has them, [tokens, heads · H]."""
  rows, queries, keys = shape
  dim = M2.head_dim
  q = (rows * queries, M2.num_heads // shards * dim)
  kv = (rows * keys, M2.num_kv_heads // shards * dim)

  def run(q, k, v, d_out, end, q_index, position):
    def attend(q, k, v):
      out = tree_attention.attend(
        q.reshape(rows, queries, -1, dim),
        k.reshape(rows, keys, -1, dim),
        v.reshape(rows, keys, -1, dim),
        tree_attention.Visibility(
          end, q_index, window, sinks, position[:, :queries], position
        ),
      )
      return out.reshape(q.shape)

    out, vjp = jax.vjp(attend, q, k, v)
    return out, vjp(d_out)

  integers = [((rows, n), jnp.int32) for n in (keys, queries, keys)]
  return run, [(q, dtype), (kv, dtype), (kv, dtype), (q, dtype), *integers]


def matmul(rows, experts, *, dtype=jnp.bfloat16, down=False, shards=1):
  width, hidden = M2.embed_dim, M2.expert_dim // shards
  if down:
    width, hidden = hidden, width

  def run(lhs, rhs, d_out, sizes):
    out, vjp = jax.vjp(lambda *a: grouped_matmul.matmul(*a, sizes), lhs, rhs)
    return out, vjp(d_out)

  shapes = (rows, width), (experts, width, hidden), (rows, hidden)
  return run, [*((shape, dtype) for shape in shapes), ((experts,), jnp.int32)]


def norm_rope(tokens, heads, *, dtype=jnp.bfloat16, split=False):
  channels, half = heads * M2.head_dim, M2.rotary_dim // 2

  def run(x, scale, cos, sin, d_out, variance):
    def apply(x, scale, variance):
      return qk_norm_rope.norm_rope(
        x,
        scale,
        cos,
        sin,
        head_dim=M2.head_dim,
        eps=M2.rms_norm_eps,
        variance=variance if split else None,
      )

    out, vjp = jax.vjp(apply, x, scale, variance)
    return out, vjp(d_out)

  shapes = [
    ((tokens, channels), dtype),
    ((channels,), jnp.float32),
    ((tokens, half), jnp.float32),
    ((tokens, half), jnp.float32),
    ((tokens, channels), dtype),
    ((tokens, 1), jnp.float32),
  ]
  return run, shapes


def logprobs(tokens, shards, *, k=None):
  """A share of the words as if they were all: the sums over shards are left out."""
  width, words = M2.embed_dim, M2.vocab_size // shards

  def run(hidden, teacher, head, targets):
    def loss(hidden, head):
      if k is None:
        return jnp.sum(token_logprobs(hidden, head, targets)[0])
      p, best = top_k_logprobs(teacher, head, k)
      q = token_logprobs(hidden, head, best)[0]
      p, q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
      return jnp.sum(jnp.exp(p) * (p - q))

    return jax.value_and_grad(loss, (0, 1))(hidden, head)

  states = ((tokens, width), jnp.bfloat16)
  head = ((width, words), jnp.float32)
  return run, [states, states, head, ((tokens,), jnp.int32)]


STACK = 4  # layers of a cache


def paged_shapes(call, positions, page, shards, dtype):
  """Of k and v, which are a quarter of what the tables could name, q and tables."""
  (rows, chunk), dim = call, M2.head_dim
  n = positions // page
  kv_heads = M2.num_kv_heads // shards
  stack = (STACK, kv_heads, rows * n // 4 + 1, page, dim)
  q = (rows, chunk, M2.num_heads // shards, dim)
  return (stack, dtype), (q, dtype), ((rows, n), jnp.int32), ((rows, chunk), jnp.int32)


def paged(call, positions, page, shards, *, dtype=jnp.bfloat16, tree=False):
  stack, q, tables, at = paged_shapes(call, positions, page, shards, dtype)

  def run(q, k, v, tables, layer, position, end):
    cache = paged_attention.Cache(k, v, tables, layer)
    end = end if tree else None
    return paged_attention.attend(q, cache, position, end, logsumexp=True)

  return run, [q, stack, stack, tables, ((), jnp.int32), at, at]


def layers(call, positions, page, shards, *, dtype=jnp.bfloat16):
  stack, q, tables, at = paged_shapes(call, positions, page, shards, dtype)
  kv_heads, pages = stack[0][1:3]
  new = ((*call, kv_heads, M2.head_dim), dtype)

  def run(k, v, tokens, q, new, tables, position):
    def layer(carry, l):
      q, pages = carry
      pages = pages.write(l, places, new, new)
      return (q + pages.attend(l, q, tables, position), pages), None

    pages = Pages(k, v, tokens)
    places = pages.places(tables, position, position >= 0)
    (q, pages), _ = jax.lax.scan(layer, (q, pages), jnp.arange(STACK))
    return pages.k, pages.v, pages.tokens, q

  tokens = ((pages, page), jnp.int32)
  return run, [stack, stack, tokens, q, new, tables, at]


def main(names):
  jax.config.update('jax_platforms', 'cpu')
  os.environ.update(
    TPU_SKIP_MDS_QUERY='1',
    TPU_ACCELERATOR_TYPE='v5p-8',
    TPU_WORKER_HOSTNAMES='localhost',
  )
  topology = topologies.get_topology_desc(platform='tpu', topology_name='v5p:2x2x1')
  chip = jax.sharding.SingleDeviceSharding(topology.devices[0])
  for name in names:
    kind = next(kind for kind, cases in MAKERS.items() if name in cases)
    *args, more = MAKERS[kind][name]
    run, shapes = globals()[kind](*args, **more)
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=chip) for shape in shapes]
    started = time.process_time()
    donated = (0, 1, 2) if kind == 'layers' else ()
    compiled = jax.jit(run, donate_argnums=donated).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    found = dict(
      case=name,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes,
      temp_bytes=memory.temp_size_in_bytes,
      kernels=compiled.as_text().count('custom_call_target="tpu_custom_call"'),
      compile_cpu_s=round(time.process_time() - started, 1),
    )
    print(json.dumps(found), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:] or CASES)
