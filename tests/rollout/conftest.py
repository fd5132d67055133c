"""A model small enough to recompute every token by a full forward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from m2jax import model
from m2jax.config import ModelConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.jetstream.calls import EngineApi
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from tests import quick

CONTEXT = 48
CFG = ModelConfig(
  vocab_size=61,
  num_layers=1,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rotary_dim=4,
  num_experts=4,
  experts_per_token=2,
  expert_dim=16,
  rope_theta=10_000.0,
  max_positions=64,
  num_mtp_modules=0,
  dtype='float32',
  unroll_layers=True,
)
ENGINE_CONFIG = EngineConfig(
  slots=4,
  context_tokens=CONTEXT,
  page_tokens=4,
  max_steps=4,
  decode_rows=(1, 4),
  prefill_shapes=((4, 8), (1, 32)),
  contexts=(24, CONTEXT),
  max_stop_ids=3,
  max_logit_bias=3,
  max_top_logprobs=4,
  confident_tokens=32,
)


RECORDING = dataclasses.replace(ENGINE_CONFIG, record_experts=True)
FEW = dataclasses.replace(
  RECORDING,
  pages=1 + 12 + 6,
  decode_rows=(4,),
  prefill_shapes=((4, 8),),
  contexts=(CONTEXT,),
)


@functools.cache
def _apply(cfg: ModelConfig):
  return jax.jit(model.M2(cfg).apply)


def init(seed: int, cfg: ModelConfig = CFG):
  """Random weights whose logits spread over several nats, so that errors show; no norm
  is 1 and no bias 0, so that none can be left out."""
  variables = quick.variables(cfg, seed, noise=0.1, bias=0.1)
  params = dict(variables['params'])
  params['head'] = params['head'] * 4
  params['embed'] = params['embed'] * 10
  return {**variables, 'params': params}


class Reference:
  """Full forward passes over whole sequences, without any cache."""

  def __init__(self, cfg: ModelConfig = CFG):
    self._apply = _apply(cfg)

  def logits(self, variables, tokens) -> np.ndarray:
    """[n, V] float64: row i predicts token i + 1."""
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.float64(self._apply(variables, padded))[0, : len(tokens)]

  def logprobs(self, variables, prompt, response, temperature=1.0) -> np.ndarray:
    """[len(response)]: log-probability of each response token."""
    logits = self.logits(variables, [*prompt, *response])[len(prompt) - 1 : -1]
    return log_softmax(logits / temperature)[np.arange(len(response)), list(response)]

  def greedy(self, variables, prompt, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
      tokens.append(int(self.logits(variables, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def log_softmax(logits):
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope='session')
def variables():
  return init(0)


@pytest.fixture(scope='session')
def other_variables():
  return init(1)


@pytest.fixture(scope='session')
def reference():
  return Reference()


@pytest.fixture(scope='session')
def engine():
  """The one of most tests; it records experts and has JetStream's calls, so that there
  is one to compile."""
  return EngineApi(CFG, RECORDING)


@pytest.fixture(scope='session')
def recording(engine):
  return engine


@pytest.fixture(scope='session')
def few():
  """An engine of which one and a half sequences fill all pages, with calls of one
  shape, so that there is little to compile."""
  return Engine(CFG, FEW)


@pytest.fixture(scope='session')
def few_of_all_shapes():
  return Engine(CFG, dataclasses.replace(RECORDING, pages=FEW.pages))


@pytest.fixture
def serve(engine, variables):
  """serve(**SchedulerConfig fields): a started Scheduler, stopped at the end."""
  with contextlib.ExitStack() as stack:

    def start(engine=engine, variables=variables, *, run=True, **fields):
      fields = {'decode_steps': 4} | fields
      scheduler = Scheduler(engine, variables, config=SchedulerConfig(**fields))
      stack.callback(scheduler.stop)
      return scheduler.start(warmup=False) if run else scheduler

    yield start
