"""Published clients finish a tool task, and every recorded token is a sampled one.

Against the scripted engine, and against a tiny model on the real one: it is trained on
what the scripted engine answered, so that it knows the task, and samples greedily.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import forest, model
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from tests.gateway import clients
from tests.rollout import conftest as small

CONTEXT = 1024


@pytest.mark.parametrize('name', clients.CLIENTS)
def test_scripted(serve, tok, name):
  """The key is a training session, as one is opened for an agent."""
  gateway, engine, records = serve(clients.script(tok))
  gateway.sessions.open('episode', 'training')
  assert clients.CLIENTS[name](gateway, 'episode') == clients.ANSWER
  assert len(records) == 3
  clients.assert_recorded(engine, records)
  clients.assert_extends(records)


def test_large_requests_are_read_as_small_ones(serve, tok):
  """In reader processes every dialect becomes the same request."""
  gateway, engine, records = serve(clients.script(tok), inline_bytes=0)
  for name in ('agents_responses', 'anthropic_runner'):
    assert clients.CLIENTS[name](gateway, name) == clients.ANSWER
    clients.assert_extends(records[-3:])
  clients.assert_recorded(engine, records)


def trained(cfg, records, steps: int = 250):
  """Weights that know the records' responses by heart."""
  samples = [forest.Sample(record.tokens, len(record.prompt_ids)) for record in records]
  batch = jax.tree.map(jnp.asarray, forest.merge(samples, row_tokens=CONTEXT))
  m2 = model.M2(cfg)
  variables = jax.jit(m2.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
  optimizer = optax.adam(3e-3)

  def loss(params):
    logprobs = model.token_logprobs(m2, {**variables, 'params': params}, batch)
    terms = jnp.take_along_axis(logprobs, batch.term_token, axis=1)
    return -jnp.sum(terms * batch.weight) / jnp.sum(batch.weight)

  @jax.jit
  def step(params, state):
    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, updates), state, value

  params = variables['params']
  state = optimizer.init(params)
  for _ in range(steps):
    params, state, value = step(params, state)
    if value < 2e-3:
      break
  assert value < 0.02, f'the model has not learned its answers: {value}'
  return {**variables, 'params': params}


class Recording:
  """A scheduler that keeps every request with its result, as ScriptedEngine does."""

  def __init__(self, scheduler):
    self._scheduler, self.results = scheduler, []

  def __getattr__(self, name):
    return getattr(self._scheduler, name)

  def submit(self, request, on_tokens=None):
    handle = self._scheduler.submit(request, on_tokens)
    handle.future.add_done_callback(
      lambda done: self.results.append((request, done.result()))
    )
    return handle


@pytest.mark.long
def test_tiny_model(serve, tok):
  gateway, _, records = serve(clients.script(tok))
  names = ('agents_responses', 'anthropic_runner')
  for name in names:
    clients.CLIENTS[name](gateway, name)
  cfg = dataclasses.replace(
    small.CFG,
    vocab_size=tok.vocab_size,
    max_positions=CONTEXT,
    embed_dim=64,
    unroll_layers=False,
  )
  config = EngineConfig(
    slots=2,
    context_tokens=CONTEXT,
    max_steps=8,
    decode_rows=(2,),
    prefill_shapes=((1, 128),),
    contexts=(CONTEXT,),
  )
  scheduler = Scheduler(
    Engine(cfg, config), trained(cfg, records), 0, SchedulerConfig()
  )
  engine = Recording(scheduler.start(warmup=False))
  served = []
  options = GatewayConfig(temperature=0.0, accept_unknown_keys=True)
  try:
    with Gateway(options, tok, engine, served.append) as gateway:
      for name in names:
        served.clear()
        engine.results.clear()
        assert clients.CLIENTS[name](gateway, name) == clients.ANSWER
        assert len(served) == 3
        clients.assert_recorded(engine, served)
        clients.assert_extends(served)
        assert np.all(np.concatenate([record.logprobs for record in served]) <= 0)
  finally:
    scheduler.stop()
