"""What each remat policy saves and what it runs again, read from the programs."""

from __future__ import annotations

import collections
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import model, params, platforms
from m2jax.kernels import tree_attention
from m2jax.layers import loop
from m2jax.sharding import ONE_DEVICE
from tests.sharding import small

BLOCKS = 3  # two layers and an MTP module
# Jax's caches know it: what is traced for a TPU here is traced again elsewhere.
_for_tpus = jax.make_user_context(False)


def config(remat: str):
  return small.config(remat=remat, dtype='float32', param_dtype='float32')


def equations(jaxpr, times=1):
  """Each equation of a program and of those it calls, and how often it runs."""
  for eqn in jaxpr.eqns:
    yield eqn, times
    inner = times * (eqn.params['length'] if eqn.primitive.name == 'scan' else 1)
    for program in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
      if hasattr(program, 'eqns'):
        yield from equations(getattr(program, 'jaxpr', program), inner)


def counts(remat: str) -> dict[str, int]:
  """How often a step runs the TPU's attention kernels, and products with the head."""
  cfg, batch = config(remat), small.batch(0, 2)

  def loss(values, router):
    out = model.forward(cfg, {'params': values, 'router': router}, batch)
    return jnp.sum(out.logprob) + jnp.sum(out.mtp_logprob)

  def tpus(*args, default, **branches):
    return branches.get('tpu', default)(*args)

  shapes = params.shapes(cfg)
  with _for_tpus(True), mock.patch.object(platforms, 'dependent', tpus):
    program = jax.make_jaxpr(jax.grad(loss))(shapes['params'], shapes['router'])
  found = collections.Counter()
  for eqn, times in equations(program.jaxpr):
    if eqn.primitive.name == 'dot_general':
      sizes = {n for v in (*eqn.invars, *eqn.outvars) for n in v.aval.shape}
      found['head'] += times * (cfg.vocab_size in sizes)
    elif eqn.primitive.name == 'pallas_call':
      found[eqn.params['name']] += times
  return found


@pytest.mark.parametrize(
  'remat', [pytest.param('none', marks=pytest.mark.thorough), 'layer', 'attention']
)
def test_what_runs_again(remat):
  """'layer' runs a block's forward pass twice; 'attention' all of it but the attention
  kernel: 2 products of its 11. Neither runs the head of an MTP module again, whose
  forward pass and two gradients need the logits twice and two more products."""
  found = counts(remat)
  forward = 2 if remat == 'layer' else 1
  assert found['tree_attention_forward'] == forward * BLOCKS
  assert found['tree_attention_d_q'] == found['tree_attention_d_kv'] == BLOCKS
  heads = 1 + config(remat).num_mtp_modules
  assert found['head'] == heads * (2 + 2)


@pytest.mark.parametrize('remat', ['layer', 'attention'])
def test_what_is_saved(remat):
  """'layer' saves the input, 'attention' also output and logsumexp; the gradient is
  that of the function without a policy."""
  rows, tokens, heads, head_dim = 2, 24, 4, 8
  rng = np.random.default_rng(0)
  seen = tree_attention.Visibility(jnp.full((rows, tokens), tokens, jnp.int32))
  x = jnp.asarray(rng.normal(size=(rows, tokens, 6)), jnp.float32)
  weights = jnp.asarray(rng.normal(size=(3, 6, heads * head_dim)), jnp.float32)

  def body(x, w):
    q, k, v = jnp.einsum('bsd,ndh->nbsh', x, w).reshape(3, rows, tokens, heads, -1)
    out = tree_attention.attend(q, k, v, seen)
    return x + jnp.sin(out.reshape(rows, tokens, -1)) @ w[0].T, None

  policy = loop.recomputed(body, config(remat), ONE_DEVICE)
  saved = jax.eval_shape(lambda *a: jax.vjp(policy, *a)[1], x, weights)
  shapes = {leaf.shape for leaf in jax.tree.leaves(saved) if leaf.ndim > 1}
  expected = {x.shape, weights.shape}
  if remat == 'attention':
    expected |= {(rows, tokens, heads * head_dim), (rows, heads, tokens)}
  assert shapes - {seen.subtree_end.shape} == expected

  def gradient(f):
    run = jax.jit(jax.grad(lambda *a: jnp.sum(f(*a)[0] ** 2), argnums=(0, 1)))
    return run(x, weights)

  for a, b in zip(gradient(policy), gradient(body), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
