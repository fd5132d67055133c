"""FLOPs counted by hand agree with XLA's where XLA can count."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import config, model
from m2jax.kernels import fp32, grouped_matmul, tree_attention
from m2jax.layers import attention, rope
from m2jax.moe import experts, router
from m2jax.plan import flops
from m2jax.sharding import ONE_DEVICE

CFG = dataclasses.replace(
  config.tiny(), embed_dim=256, num_heads=8, expert_dim=1536, num_experts=1,
  experts_per_token=1, num_mtp_modules=0,
)  # fmt: skip
ROWS, TOKENS = 2, 256
PART = flops.local(CFG, ONE_DEVICE, ROWS, TOKENS, TOKENS)
ONE = flops.layer(CFG, PART, padded=False)


def xla(f, *shapes) -> float:
  """FLOPs of XLA's cost analysis."""
  arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  return jax.jit(f).lower(*arguments).compile().cost_analysis()['flops']


T, D, H = PART.tokens, CFG.embed_dim, CFG.head_dim
Q, KV = CFG.num_heads * H, CFG.num_kv_heads * H


def projections(x, q, k, v, o):
  p = dict(q=q, k=k, v=v, o=o, q_norm=jnp.ones(Q), k_norm=jnp.ones(KV))
  tables = rope.tables(jnp.arange(T), CFG.rotary_dim, CFG.rope_theta)
  return attention.apply(x, p, CFG, tables, lambda q, k, v: (q, (k, v)))


def mixture(x, r, gate, up, down):
  ids, weights = router.route(x, r, jnp.zeros(CFG.num_experts), CFG.experts_per_token)
  with mock.patch.object(grouped_matmul, 'matmul', jax.lax.ragged_dot):
    return experts.grouped(x, ids, weights, gate, up, down)


@pytest.mark.parametrize('step', [False, True], ids=['forward', 'with gradient'])
@pytest.mark.parametrize(
  'f, shapes, expected',
  [
    (projections, [(T, D), (D, Q), (D, KV), (D, KV), (Q, D)], ONE['attention']),
    (
      mixture,
      [(T, D), (D, CFG.num_experts), *[(CFG.num_experts, D, CFG.expert_dim)] * 2,
       (CFG.num_experts, CFG.expert_dim, D)],
      ONE['experts'] + ONE['router'],
    ),
  ],
  ids=['projections', 'experts'],
)  # fmt: skip
def test_matmuls_are_those_of_the_compiled_program(f, shapes, expected, step):
  """The plan's FLOPs are counted by hand: a matmul forgotten or counted twice would
  move every share of peak. There is one expert, so that `ragged_dot`, which the
  compiler can count on a CPU, multiplies no row twice; what XLA adds is elementwise."""
  run, times = f, 1
  if step:
    times = 3
    every = tuple(range(len(shapes)))

    def loss(*a):
      leaves = jax.tree.leaves(f(*a))
      return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves)

    run = jax.grad(loss, argnums=every)
  counted = xla(run, *shapes)
  assert times * expected <= counted * 1.001
  assert counted <= times * expected * 1.12


def test_attention_core_is_that_of_the_compiled_program():
  """The reference computes the whole square, which is one block of the kernels."""

  def f(q, k, v):
    end = jnp.full((ROWS, TOKENS), TOKENS, jnp.int32)
    seen = tree_attention.Visibility(end)
    return tree_attention.attend(q, k, v, seen, implementation='reference')

  kv = (ROWS, TOKENS, CFG.num_kv_heads, H)
  counted = xla(f, (ROWS, TOKENS, CFG.num_heads, H), kv, kv)
  whole = 2 * 2 * H * CFG.num_heads * ROWS * flops.pairs(PART, TOKENS)
  assert whole <= counted <= 1.25 * whole


def test_fp32_logits_are_as_many_products_as_counted():
  """Head and router run wider than the rest: counted as one they would flatter it."""
  x, w = jnp.zeros((T, D), jnp.bfloat16), jnp.zeros((D, 512))
  compiled = jax.jit(fp32._split).lower(x, w).compile()
  counted = compiled.cost_analysis()['flops']
  one = flops.product(T, D, 512)
  assert flops._FP32 * one <= counted <= flops._FP32 * one * 1.02
  part = dataclasses.replace(PART, vocab=512)
  head = flops.executed(CFG, part, 1, training=True)
  assert head['forward', 'rest'] + head['backward', 'rest'] == (2 + 2 + 2) * one


def test_pairs_are_those_seen():
  """Blocks cost at least the pairs that are seen, and their share falls with size."""
  seen = np.tril(np.ones((TOKENS, TOKENS))).sum()
  assert flops.pairs(PART) == seen
  late = dataclasses.replace(PART, queries=128, ends=(TOKENS,))
  assert flops.pairs(late) == np.tril(np.ones((TOKENS, TOKENS)))[-128:].sum()
  assert flops.pairs(PART, 128) == 3 * 128 * 128
  long = flops.Local(1, 8192, (8192,), 1, 1, 1, 1, 1, 1)
  assert 1 < flops.pairs(long, 512) / flops.pairs(long) < 1.07


def test_m2_has_its_published_active_parameters():
  """Six FLOPs a parameter and token: 9.8B of the body and the head's 0.61B."""
  cfg = dataclasses.replace(config.m2(), num_mtp_modules=0)
  part = flops.local(cfg, ONE_DEVICE, 1, 1024, 1024)
  core = flops.layer(cfg, part, padded=False)['core']
  total = flops.useful(cfg, part, training=True) - 3 * cfg.num_layers * core
  per_token = total / 6 / 1024
  # norms have no matmul: 62 of 13,312
  norms = cfg.num_layers * (2 * cfg.embed_dim + Q_M2 + KV_M2)
  assert per_token + norms == 62 * 158_086_400 - 62 * 256 + 200_064 * 3072


Q_M2, KV_M2 = 48 * 128, 8 * 128


def test_executed_is_never_less_than_useful():
  """Padding, recomputation and unequal shards only add."""
  cfg = config.m2()
  part = flops.local(cfg, ONE_DEVICE, 1, 8192, 8192)
  done = flops.executed(cfg, part, 128, training=True)
  useful = flops.useful(cfg, part, training=True)
  assert 4 / 3 < sum(done.values()) / useful < 1.9
  without = flops.executed(dataclasses.replace(cfg, remat='none'), part, 128, True)
  again = sum(v for (which, _), v in done.items() if which == 'recompute')
  assert sum(without.values()) == pytest.approx(sum(done.values()) - again)


def test_parameters_of_the_model_are_those_it_makes():
  """The shapes counted are those of the model itself."""
  shapes = jax.eval_shape(
    lambda key: model.M2(CFG).init(key, jnp.zeros((1, 2), jnp.int32)),
    jax.random.key(0),
  )
  layers = shapes['params']['layers']
  matrices = sum(
    layers[name].size for name in ('q', 'k', 'v', 'o', 'gate', 'up', 'down', 'router')
  )
  per_token = ONE['attention'] + ONE['experts'] + ONE['router']
  assert per_token * CFG.num_layers / (2 * T) == matrices
