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
  """The same by the engine's calls, two chunks and one step."""
  from m2jax import sharding
  from m2jax.rollout.engine import decode_state
  from m2jax.rollout.engine.config import EngineConfig
  from m2jax.rollout.engine.engine import Engine

  where = sharding.make(sharding.MeshConfig(**mesh, rules='serve'))
  groups = where.size('rows')
  slots = ROWS // groups
  config = EngineConfig(
    slots=ROWS,
    context_tokens=TOKENS + ROOM,
    page_tokens=4,
    decode_rows=(ROWS,),
    max_stop_ids=1,
  )
  engine = Engine(cfg, config, where)
  weights, state = engine.load_params(variables), engine.init_decode_state()
  pages = 1 + np.arange(slots * config.context_pages, dtype=np.int32)
  tables = np.tile(pages.reshape(slots, -1), (groups, 1))
  for start, stop in CHUNKS:
    starts = np.full(ROWS, start, np.int32)
    counts = np.full(ROWS, stop - start, np.int32)
    chunk = np.asarray(tokens[:, start:stop])
    state = engine.prefill_rows(weights, state, chunk, starts, counts, tables)
  how = decode_state.make_slots(ROWS, config)
  how.length[:], how.remaining[:], how.temperature[:] = LENGTHS, 2, 0
  how.token[:] = np.asarray(tokens)[np.arange(ROWS), LENGTHS]
  rows = np.tile(np.arange(slots, dtype=np.int32), groups)
  state = engine.admit(state, rows, np.full(groups, slots, np.int32), how)
  _, result = engine.generate_step(weights, state)
  return np.asarray(result.data)[:, 0], np.asarray(result.log_prob)[:, 0]


def main(names):
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)
  jax.config.update('jax_enable_x64', True)
  from m2jax import platforms
  from m2jax.kernels.paged_attention import cpu as paged_attention
  from m2jax.train import step as train_step
  from tests.sharding import small

  platforms.own_only()

  cfg = small.config(num_mtp_modules=0)
  variables = train_step.init_variables(cfg, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (ROWS, TOKENS), 0, cfg.vocab_size)
  tokens = tokens.astype(jnp.int32)
  token, logprob = expected(cfg, variables, tokens)
  for name in names:
    paged_attention.LONG_CHUNK = 2 if 'long' in name else 512
    got_token, got_logprob = served(cfg, variables, tokens, MESHES[name])
    error = float(np.max(np.abs(got_logprob - logprob)))
    same = bool((got_token == token).all())
    print(json.dumps({'case': name, 'same': same, 'error': error}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:] or MESHES)
