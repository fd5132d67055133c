"""Prefill and decode on meshes of 8 virtual CPU devices against the model; prints JSON.

Its own process: the number of devices and float64 are set before jax starts.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

ROWS, TOKENS, ROOM = 8, 12, 4
LENGTHS = np.array([11, 3, 7, 11, 5, 9, 1, 10], np.int32)  # held when decoding begins
CHUNKS = ((0, 8), (8, 11))
MESHES = {
  'expert': dict(expert=8),
  'tensor': dict(data=2, tensor=4),
  'all, long chunks': dict(data=2, expert=2, tensor=2),
}


def expected(cfg, variables, tokens):
  """Greedy token and its log-probability after each row's first LENGTHS + 1 tokens."""
  from m2jax import model

  logits = model.M2(cfg).apply(variables, tokens)
  logprobs = jax.nn.log_softmax(logits)[np.arange(ROWS), LENGTHS]
  return np.argmax(logprobs, -1), np.max(logprobs, -1)


def served(cfg, variables, tokens, mesh):
  """The same through the cache, in two chunks and one step."""
  from m2jax import sharding
  from m2jax.rollout import kv_cache, on_mesh

  where = sharding.make(sharding.MeshConfig(**mesh, rules='serve'))
  rules = where.rules
  variables = where.place(variables, sharding.param_specs(cfg, rules))
  cache = where.place(
    kv_cache.init(cfg, ROWS, TOKENS + ROOM), on_mesh.cache_specs(rules)
  )
  prefill = on_mesh.jit_prefill(cfg, where)
  for start, stop in CHUNKS:
    starts = jnp.full(ROWS, start, jnp.int32)
    cache = prefill(variables, cache, tokens[:, start:stop], starts)
  zeros = jnp.zeros(ROWS)
  draws = on_mesh.Sampling(
    jnp.zeros((ROWS, 2), jnp.uint32), jnp.zeros(ROWS, jnp.int32), zeros,
    jnp.zeros(ROWS, jnp.int32), zeros + 1,
  )  # fmt: skip
  last = tokens[np.arange(ROWS), LENGTHS]
  decode = on_mesh.jit_decode(cfg, where)
  _, token, logprob = decode(variables, cache, last, jnp.asarray(LENGTHS), draws)
  return np.asarray(token), np.asarray(logprob)


def main(names):
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)
  jax.config.update('jax_enable_x64', True)
  from m2jax.rollout import forward
  from m2jax.train import step as train_step
  from tests.sharding import small

  cfg = small.config(num_mtp_modules=0)
  variables = train_step.init_variables(cfg, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (ROWS, TOKENS), 0, cfg.vocab_size)
  tokens = tokens.astype(jnp.int32)
  token, logprob = expected(cfg, variables, tokens)
  for name in names:
    forward._LONG_CHUNK = 2 if 'long' in name else 512
    got_token, got_logprob = served(cfg, variables, tokens, MESHES[name])
    error = float(np.max(np.abs(got_logprob - logprob)))
    same = bool((got_token == token).all())
    print(json.dumps({'case': name, 'same': same, 'error': error}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:] or MESHES)
