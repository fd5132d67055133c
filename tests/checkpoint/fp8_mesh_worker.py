"""Block FP8 on a mesh of one process: weights of the release, the engine, training.

python -m tests.checkpoint.fp8_mesh_worker DIRECTORY
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import forest, model, sharding
from m2jax.checkpoint import huggingface
from m2jax.config import Matmuls
from m2jax.kernels import block_fp8
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.sharding import PRESETS, MeshConfig, Sharding

ROWS, CONTEXT = 2, 128  # whole tiles along tokens on each device


def on(preset: str, **sizes) -> Sharding:
  config = MeshConfig(**sizes)
  return Sharding(sharding.make_mesh(config), PRESETS[preset])


def check_equal(ours, theirs, tolerance):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    error = np.linalg.norm(np.float64(a) - np.float64(b))
    assert error <= tolerance * np.linalg.norm(np.float64(b)), error


def weights(directory: str):
  """Loaded onto a mesh they are the same bits, and score and serve the same."""
  cfg, whole = huggingface.load(directory, dtype='block_fp8')
  batch = forest.causal(jnp.arange(ROWS * 16).reshape(ROWS, 16) % cfg.vocab_size)
  want = model.token_logprobs(model.M2(cfg), whole, batch)
  serve = on('serve', expert=3)
  _, found = huggingface.load(
    directory, mesh=serve.mesh, rules=serve.rules, dtype='block_fp8'
  )
  assert found['params']['layers']['gate'].scale.sharding.spec[1] == 'expert'
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  config = EngineConfig(slots=1, context_tokens=64, weights_dtype='block_fp8')
  loaded = Engine(cfg, config, serve).load_params(found)
  assert block_fp8.Blocks is type(loaded['params']['layers'][0]['gate'])
  # shards of D, in storage, need not be whole blocks: they are gathered
  gathered = on('fsdp', fsdp=2)
  placed = gathered.place(whole, sharding.param_specs(cfg, gathered.rules))
  found = model.token_logprobs(model.M2(cfg), placed, batch, sharding=gathered)
  check_equal(found, want, 1e-5)


def training(directory: str):
  """Loss and gradients of quantised matmuls are those of one device (law 6)."""
  cfg, whole = huggingface.load(directory)
  cfg = dataclasses.replace(cfg, matmuls=Matmuls('block_fp8'))
  tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=(ROWS, CONTEXT))
  batch = forest.causal(jnp.asarray(tokens))

  def loss(params, router, where):
    variables = {'params': params, 'router': router}
    found = model.token_logprobs(model.M2(cfg), variables, batch, sharding=where)
    return -jnp.mean(found)

  grad = jax.jit(jax.value_and_grad(loss), static_argnums=2)
  want = grad(whole['params'], whole['router'], sharding.ONE_DEVICE)
  where = on('fsdp', fsdp=2)
  placed = where.place(whole, sharding.param_specs(cfg, where.rules))
  found = grad(placed['params'], placed['router'], where)
  check_equal(found[0], want[0], 1e-5)
  # Tiles along tokens are of a device's own rows: of an expert's they are others.
  names = ('q', 'k', 'v', 'o')
  attention = [{n: g['layers'][n] for n in names} for g in (found[1], want[1])]
  check_equal(*attention, 2e-2)
  experts = [g['layers']['gate'] for g in (found[1], want[1])]
  check_equal(*experts, 1e-1)


def main():
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 3)
  weights(sys.argv[1])
  training(sys.argv[1])
  print('all equal')


if __name__ == '__main__':
  main()
