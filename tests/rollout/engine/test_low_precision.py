"""Weights and cache in FP8: what the engine serves, from how much memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest, model
from m2jax.config import Matmuls
from m2jax.kernels import block_fp8
from m2jax.kernels.block_fp8 import weights
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine import pages
from m2jax.rollout.engine.engine import Engine
from tests.rollout.conftest import CFG, CONTEXT, ENGINE_CONFIG

PROMPT, TOKENS = list(range(5, 18)), 12
ONE_SHAPE = dataclasses.replace(
  ENGINE_CONFIG, decode_rows=(4,), prefill_shapes=((4, 8),), contexts=(CONTEXT,)
)
FP8 = dataclasses.replace(ONE_SHAPE, weights_dtype='block_fp8')


def served(serve, engine, variables):
  scheduler = serve(engine, variables)
  request = GenerateRequest(PROMPT, SamplingParams(max_tokens=TOKENS))
  result = scheduler.submit(request).future.result(timeout=120)
  assert result.experts is None  # by default they are not recorded
  return result


@pytest.fixture(scope='module')
def blocks(variables):
  return jax.jit(block_fp8.quantize_variables)(variables)


def dequantized(blocks):
  return jax.jit(
    lambda blocks: weights.map_weights(lambda w: w.astype(jnp.float32), blocks)
  )(blocks)


@pytest.mark.parametrize('unroll', [True, pytest.param(False, marks=pytest.mark.long)])
def test_weights_in_blocks(serve, variables, blocks, reference, unroll):
  """The engine quantises what it is given, or takes the blocks as they are: both serve
  the dequantised model."""
  engine = Engine(dataclasses.replace(CFG, unroll_layers=unroll), FP8)
  for given in (variables, blocks) if unroll else (blocks,):
    result = served(serve, engine, given)
    want = reference.logprobs(dequantized(blocks), PROMPT, result.tokens)
    np.testing.assert_allclose(result.logprobs, want, atol=1e-4)


def test_memory_of_weights(variables, blocks):
  """Nothing but a byte a weight and the scales is on the device after loading."""
  engine = Engine(CFG, FP8)
  loaded = engine.load_params(variables)
  assert weights.nbytes(loaded) == weights.nbytes(blocks)
  with pytest.raises(ValueError, match='EngineConfig.weights_dtype=None'):
    Engine(CFG, ENGINE_CONFIG).load_params(blocks)


def test_matmuls_in_block_fp8(serve, variables, reference):
  """A model trained with quantised matmuls is served with them: the log-probabilities
  are those of training, and not those of plain matmuls."""
  cfg = dataclasses.replace(CFG, matmuls=Matmuls('block_fp8'))
  result = served(serve, Engine(cfg, ONE_SHAPE), variables)
  batch = forest.causal(jnp.array([[*PROMPT, *result.tokens]]))

  score = jax.jit(lambda v: model.token_logprobs(model.M2(cfg), v, batch))
  trained = np.asarray(score(variables))[0, len(PROMPT) :]
  np.testing.assert_allclose(result.logprobs, trained, atol=2e-3)
  plain = reference.logprobs(variables, PROMPT, result.tokens)
  assert np.abs(result.logprobs - plain).max() > 1e-2


def test_a_cache_in_fp8(serve, variables, reference):
  """A quarter of the cache's memory, and close to the exact log-probabilities."""
  config = dataclasses.replace(ONE_SHAPE, cache_dtype='float8_e4m3fn')
  result = served(serve, Engine(CFG, config), variables)
  want = reference.logprobs(variables, PROMPT, result.tokens)
  error = np.abs(result.logprobs - want)
  assert 1e-4 < error.max() < 0.3
  cache, full = (Engine(CFG, c).state_shapes().pages for c in (config, ONE_SHAPE))
  assert cache.k.dtype.itemsize * 4 == full.k.dtype.itemsize


def test_the_cache_saturates():
  """Beyond ±448 a cast to e4m3fn would give NaN, which attention would spread."""
  x = jnp.array([1e4, -1e4, 449.0, 1.06, jnp.nan])
  stored = pages.as_stored(x, jnp.dtype('float8_e4m3fn')).astype(jnp.float32)
  np.testing.assert_array_equal(stored, [448, -448, 448, 1.0, np.nan])


def test_an_unknown_dtype_is_named():
  for field in ('cache_dtype', 'weights_dtype'):
    with pytest.raises(ValueError, match=f"EngineConfig.{field}='int3'"):
      dataclasses.replace(ENGINE_CONFIG, **{field: 'int3'})
