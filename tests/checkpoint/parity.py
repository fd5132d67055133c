"""Logits and gradients of m2jax under the released tensor names, to be compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import model
from m2jax.checkpoint import huggingface_names, leaves


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
  for tensor in huggingface_names.tensors(cfg):
    if tensor.leaf in table:
      part = np.asarray(table[tensor.leaf])[tensor.index]
      found[f'grad.{tensor.name}'] = part.T if tensor.transposed else part
  return np.asarray(logits), found


def check(cfg, variables, expected):
  """Logits to 1e-4; each parameter's gradient to 1e-4 of its norm, none left out."""
  logits, grads = computed(cfg, variables, jnp.asarray(expected['tokens']))
  np.testing.assert_allclose(logits, expected['logits'], atol=1e-4, rtol=1e-4)
  wanted = {name for name in expected if name.startswith('grad.')}
  assert wanted == grads.keys()
  for name, ours in grads.items():
    error = np.linalg.norm(ours - expected[name])
    # an expert that no token chose has none at all
    assert error <= 1e-4 * np.linalg.norm(expected[name]), (name, error)
