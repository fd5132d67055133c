"""Routing replay from the engine to the loss: ids recorded, stored, merged, used."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import forest, records
from m2jax.gateway import service, sessions
from m2jax.gateway.config import GatewayConfig
from m2jax.pool import data_pool
from m2jax.rl import learner, rewards, samples
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.text import tokenizer
from m2jax.train import step as train_step
from tests.rollout import conftest as small

TIMEOUT_S = 60


@pytest.fixture(scope='module')
def tok():
  return tokenizer.train(['count the lines of the file a.txt'] * 8, 500)


@pytest.fixture(scope='module')
def cfg(tok):
  return dataclasses.replace(
    small.CFG, vocab_size=tok.vocab_size, max_positions=512, unroll_layers=False
  )


@pytest.fixture(scope='module')
def engine(cfg):
  config = EngineConfig(
    slots=4,
    context_tokens=256,
    decode_rows=(4,),
    prefill_shapes=((2, 64),),
    contexts=(256,),
    record_experts=True,
  )
  return Engine(cfg, config)


@contextlib.contextmanager
def serving(engine, variables):
  config = SchedulerConfig(reuse_stale_prefix=False)
  scheduler = Scheduler(engine, variables, config=config).start(warmup=False)
  try:
    yield scheduler
  finally:
    scheduler.stop()


def ask(chat, session, messages):
  """One completion as a client gets it: the message."""
  body = {'model': 'm2jax', 'messages': messages, 'max_tokens': 12}

  async def submit():
    async with chat.read(
      bytearray(json.dumps(body).encode()), 'openai_chat'
    ) as reading:
      return await chat.submit(session.name, reading)

  [pending] = asyncio.run(submit())
  future = pending.handle.future
  future.result(TIMEOUT_S)
  return asyncio.run(chat.finish(pending, future)).message


class Forgetful:
  """A pool that stores no expert ids."""

  def __init__(self, pool):
    self._pool = pool

  def group(self, index):
    return [
      (trajectory, [dataclasses.replace(c, experts=None) for c in turns])
      for trajectory, turns in self._pool.group(index)
    ]


@pytest.mark.long
def test_recorded_routing_reproduces_the_engine(cfg, tok, engine, tmp_path):
  """Two trajectories of two turns go through engine, gateway and pool to a learner with
  very different router biases: without the records it routes differently, with them its
  log-probabilities are those that the engine recorded."""
  variables = small.init(0, cfg)
  url = f'sqlite:///{tmp_path}/pool.db'
  with data_pool.DataPool(url) as pool, serving(engine, variables) as scheduler:
    open_sessions = sessions.Sessions(
      accept_unknown=False,
      max_unknown=1,
      max_unknown_bytes=1,
      limits=sessions.Limits(completions=100, bytes=1 << 20),
    )
    chat = service.ChatService(
      GatewayConfig(), tok, scheduler, pool.add_completion, open_sessions
    )
    pool.submit(records.WorkItem(0, 't', 2))
    for rank in range(2):
      session = open_sessions.open(f's{rank}')
      messages = [{'role': 'user', 'content': 'count the lines of a.txt'}]
      for _ in range(2):
        messages += [ask(chat, session, messages)]
        messages += [{'role': 'user', 'content': 'of the file'}]
      pool.add_trajectory(
        records.Trajectory(f's{rank}', 0, rank, 't', 'f', 'answer', rank, 1.0, 0)
      )
    pool.complete(0)
    assert scheduler.stats()['prefix_hit_tokens'] > 0

    off = jax.random.normal(jax.random.key(1), variables['router']['layers'].shape)
    optimizer = optax.sgd(0.0)

    config = learner.LearnerConfig(
      row_tokens=256, row_terms=64, step=train_step.StepConfig(micro_rows=1)
    )

    def update(pool):
      perturbed = {'params': variables['params'], 'router': {'layers': off}}
      state = train_step.init_state(jax.tree.map(jnp.copy, perturbed), optimizer)
      one = learner.Learner(cfg, config, optimizer, state)
      return one.update([one.credit(pool.group(0))])

    replayed, forgetful = update(pool), update(Forgetful(pool))
  # the mean over the terms of |log p − recorded log p|
  assert replayed['abs_log_ratio'] < 1e-4
  assert replayed['replay/disagreement'] == 0
  assert forgetful['abs_log_ratio'] > 0.1
  assert 'replay/disagreement' not in forgetful


@pytest.mark.long
def test_disagreement_of_two_routers(cfg, engine):
  """The same prompt under two router biases: the records of the second completion
  differ, those of the first are used, and the rate measures the disagreement."""
  variables = small.init(0, cfg)
  router = {'layers': variables['router']['layers'] + np.linspace(0, 1, 4)}
  prompt = tuple(range(5, 25))
  found = []
  with serving(engine, variables) as scheduler:
    for version in range(2):
      if version:
        scheduler.update_weights({**variables, 'router': router}, version)
      request = GenerateRequest(prompt, SamplingParams(max_tokens=6, seed=version))
      found.append(scheduler.submit(request).future.result(TIMEOUT_S))
  batch = [
    forest.Sample(np.array([*prompt, *r.tokens]), len(prompt), experts=r.experts)
    for r in found
  ]
  got = forest.disagreement(batch)
  assert got.compared >= len(prompt) and 0 < got.rate <= 1
  merged = forest.merge(batch, row_tokens=64)
  np.testing.assert_array_equal(merged.experts[0, :20], found[0].experts[:20])


LAYERS, TOP_K = 2, 2


@st.composite
def trajectories(draw):
  """Sessions whose turns extend each other from a few common prompts; each completion
  has its own records or none."""
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  out = []
  for session in range(draw(st.integers(1, 4))):
    ids, turns = tuple(range(1, 1 + rng.integers(1, 4))), []
    for turn in range(rng.integers(1, 4)):
      response = tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist())
      experts = None
      if rng.random() < 0.8:
        shape = len(ids + response), LAYERS, TOP_K
        experts = rng.integers(0, 2**15, shape).astype(np.int16)
        experts[rng.random(len(experts)) < 0.3] = -1
      completion = records.Completion(
        id=f'{session}/{turn}',
        session=str(session),
        turn=turn,
        parent=None,
        fork_reason=None,
        prompt_ids=ids,
        response_ids=response,
        logprobs=(-1.0,) * len(response),
        versions=(0,) * len(response),
        finish_reason='stop',
        status='ok',
        experts=experts,
      )
      turns.append(completion)
      ids += response + tuple(rng.integers(0, 2, rng.integers(0, 3)).tolist())
    out.append(turns)
  return out


@given(trajectories())
def test_ids_survive_to_the_forest(group):
  """Records → pool → samples → forest: each token of the forest has the ids of the
  first completion that sampled it and recorded it, else of the first that had it in its
  prompt, else -1."""
  with tempfile.TemporaryDirectory() as directory:
    with data_pool.DataPool(f'sqlite:///{directory}/pool.db') as pool:
      pool.submit(records.WorkItem(0, 't', len(group)))
      for rank, turns in enumerate(group):
        for completion in turns:
          pool.add_completion(completion)
        # success differs, so that the group is trained; alone it is dropped
        end = records.Trajectory(
          str(rank), 0, rank, 't', 'f', 'answer', rank / 4, 1.0, 0
        )
        pool.add_trajectory(end)
      pool.complete(0)
      credit = rewards.advantages(pool.group(0), rewards.RewardConfig())
  batch = samples.from_group(credit, [1.0] * len(group))
  merged = forest.merge(batch, row_tokens=40)

  want = collections.defaultdict(list)  # path → ids of its last token, best last
  for sampled in (False, True):
    for c in reversed([c for turns in group for c in turns]):
      ids = tuple(c.tokens.tolist())
      for i in range(len(ids)):
        in_response = i >= len(c.prompt_ids)
        if c.experts is not None and in_response == sampled and c.experts[i, 0, 0] >= 0:
          want[ids[: i + 1]].append(c.experts[i])
  if merged.experts is None:
    assert not any(c.experts is not None for turns in group for c in turns)
    return
  for row in range(len(merged.tokens)):
    for i in np.flatnonzero(merged.subtree_end[row]):
      path, at = (), i
      while at >= 0:
        path = (int(merged.tokens[row, at]), *path)
        at = merged.parent[row, at]
      ids = want[path][-1] if want[path] else np.full((LAYERS, TOP_K), -1)
      np.testing.assert_array_equal(merged.experts[row, i], ids)
