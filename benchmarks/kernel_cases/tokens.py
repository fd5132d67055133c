"""Shapes, costs and peers of QK-norm with RoPE, and of log-probabilities.

Axes: T flat tokens, D model, N heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.op import Op, arrays_of, bytes_of
from m2jax import config
from m2jax.kernels import qk_norm_rope, token_logprobs

M2 = config.m2()


def _norm_make(tokens, heads, dim, rotary, dtype):
  x, weight = arrays_of(dtype, *((tokens, heads * dim),) * 2)
  (scale,) = arrays_of(jnp.float32, (heads * dim,))
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
  return 10 * x.size * (2 if both else 1), bytes_of(x) * (5 if both else 2)


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


def _logprobs_make(tokens, width, words, dtype):
  hidden, weight = arrays_of(dtype, (tokens, width), (tokens,))
  (head,) = arrays_of(jnp.float32, (width, words), seed=1)
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
  size = bytes_of(hidden, head)
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
