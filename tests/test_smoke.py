"""The public names of DESIGN §8 work on this Python: run on the newest by .ci/run."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.smoke


def test_model_forest_and_loss():
  """From tokens to a CISPO gradient: what a researcher's first script does."""
  import jax
  import jax.numpy as jnp

  from m2jax import config, forest, model
  from m2jax.rl.estimators import cispo

  cfg = config.tiny()
  m2 = model.M2(cfg)
  tokens = jnp.arange(8, dtype=jnp.int32)[None]
  variables = jax.jit(m2.init)(jax.random.key(0), tokens)
  logits = jax.jit(m2.apply)(variables, tokens)
  assert logits.shape == (1, 8, cfg.vocab_size) and logits.dtype == jnp.float32

  samples = [
    forest.Sample(
      np.array([1, 2, 3, 4 + i]),
      2,
      old_logprobs=np.full(2, -1.0),
      advantages=np.array([1.0, -1.0]),
      weights=np.full(2, 0.25),
    )
    for i in range(2)
  ]
  batch = forest.merge(samples, row_tokens=8)
  assert int((np.asarray(batch.subtree_end) > 0).sum()) == 5  # 1 2 3 {4, 5}

  def loss(params):
    logprobs = model.token_logprobs(m2, {**variables, 'params': params}, batch)
    row = jnp.arange(batch.tokens.shape[0])[:, None]
    terms = cispo.loss(
      logprobs[row, batch.term_token],
      batch.old_logprob,
      batch.advantage,
      batch.weight,
    )
    return terms.sum()

  value, grads = jax.jit(jax.value_and_grad(loss))(variables['params'])
  assert np.isfinite(value)
  assert any(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads))


def test_chat_round_trip():
  """A rendered tool call is parsed back to the same message."""
  from m2jax.text import chat

  call = {'name': 'bash', 'arguments': {'command': 'wc -l f'}}
  messages = [
    {'role': 'user', 'content': 'How many lines?'},
    {
      'role': 'assistant',
      'content': '',
      'reasoning_content': 'Count them.',
      'tool_calls': [{'id': 'c', 'type': 'function', 'function': call}],
    },
  ]
  before = chat.render(messages[:1], add_generation_prompt=True)
  text = chat.render(messages)
  assert text.startswith(before)
  parsed = chat.parse(text[len(before) :])
  assert parsed.tool_calls[0].name == 'bash'


def test_windowed_fifo():
  """Only completed items within the window of the head may be taken."""
  from m2jax.pool import windowed_fifo

  fifo = windowed_fifo.WindowedFifo(capacity=10, window=2)
  for item in range(4):
    fifo.submit(item)
  fifo.complete(1, 'b')
  fifo.complete(3, 'd')
  assert fifo.take(4) == [(1, 'b')]
