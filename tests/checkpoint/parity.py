"""Logits and gradients of m2jax under the released tensor names, to be compared.

python -m tests.checkpoint.parity

prints how far both are from what transformers computed, for the models in golden/.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from m2jax import model
from m2jax.checkpoint import huggingface, leaves
from m2jax.checkpoint.huggingface import names

GOLDEN = pathlib.Path(__file__).parent / 'golden'


@functools.partial(jax.jit, static_argnums=0)
def _loss(cfg, params, router, tokens):
  logits = model.M2(cfg).apply({'params': params, 'router': router}, tokens)
  logprobs = jax.nn.log_softmax(logits[:, :-1])
  nll = -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)
  return jnp.mean(nll), logits


def computed(cfg, variables, tokens):
  """Logits, and {'grad.NAME': gradient of the mean next-token loss}."""
  gradient = jax.grad(_loss, argnums=1, has_aux=True)
  grads, logits = gradient(cfg, variables['params'], variables['router'], tokens)
  table = leaves.table({'params': grads})
  found = {}
  for tensor in names.tensors(cfg):
    if tensor.leaf in table:
      part = np.asarray(table[tensor.leaf])[tensor.index]
      found[f'grad.{tensor.name}'] = part.T if tensor.transposed else part
  return np.asarray(logits), found


def errors(cfg, variables, expected):
  """Largest |Δlogit|, and each parameter's ‖Δgradient‖ over its norm, none left out."""
  logits, grads = computed(cfg, variables, jnp.asarray(expected['tokens']))
  wanted = {name for name in expected if name.startswith('grad.')}
  assert wanted == grads.keys()
  found = {}
  for name, ours in grads.items():
    error, norm = (np.linalg.norm(x) for x in (ours - expected[name], expected[name]))
    found[name] = error / norm if norm else error  # an expert that no token chose
  return np.max(np.abs(logits - expected['logits'])), found


def check(cfg, variables, expected):
  """Logits and gradients to 1e-4."""
  logits, grads = errors(cfg, variables, expected)
  worst = max(grads, key=grads.get)
  assert logits <= 1e-4
  assert grads[worst] <= 1e-4, (worst, grads[worst])


def main():
  print('| model | heads | head dim, rotary | experts | max Δlogit | max Δgradient |')
  print('|---|---|---|---|---|---|')
  for directory in sorted(GOLDEN.iterdir()):
    cfg, variables = huggingface.load(directory)
    logits, grads = errors(
      cfg, variables, load_file(directory / 'expected.safetensors')
    )
    shape = (
      f'{cfg.num_heads} / {cfg.num_kv_heads} | {cfg.head_dim}, {cfg.rotary_dim} | '
      f'{cfg.experts_per_token} of {cfg.num_experts}'
    )
    worst = max(grads.values())
    print(f'| {directory.name} | {shape} | {logits:.1e} | {worst:.1e} |')


if __name__ == '__main__':
  main()
