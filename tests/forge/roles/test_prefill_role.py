"""The prefill engine beside the engine, on weights that a learner publishes."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from m2jax.checkpoint import published
from m2jax.forge.config import ForgeConfig, RolesConfig
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles import engine as engine_role
from m2jax.forge.roles import prefill as prefill_role
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.disaggregation.handover import HandoverConfig
from m2jax.rollout.serving.config import SchedulerConfig
from tests import processes
from tests.forge.forge_worker import config as run_config
from tests.forge.roles.test_agents import wait_until
from tests.rollout.conftest import CFG, ENGINE_CONFIG, init

KEY = 'k' * 43


def settings(address: str) -> ForgeConfig:
  roles = RolesConfig(
    prefill_address=address,
    handover=HandoverConfig(local_tokens=ENGINE_CONFIG.page_tokens),
  )
  return dataclasses.replace(
    run_config(),
    model=CFG,
    engine=ENGINE_CONFIG,
    scheduler=SchedulerConfig(decode_steps=4, reuse_stale_prefix=True),
    roles=roles,
  )


def ask(scheduler, tokens):
  sampling = SamplingParams(max_tokens=6, temperature=0.0)
  return scheduler.submit(GenerateRequest(tokens, sampling)).future.result(60)


@pytest.mark.long
def test_prompts_are_computed_elsewhere(engine, serve, tmp_path):
  """Tokens are those of one engine, before and after new weights, which the prefill
  engine reads by itself; without it the engine goes on alone."""
  config = settings(f'tcp:127.0.0.1:{processes.free_port()}')
  weights = tmp_path / 'weights'
  local = serve()
  prompt = np.arange(1, 25)
  with contextlib.ExitStack() as stack:
    publisher = stack.enter_context(published.Publisher(weights))
    publisher.publish(init(0), 0, 0)
    reader = published.Reader(weights, poll_s=0.01)
    server = prefill_role.serve(config, engine, published.Reader(weights), KEY)
    stack.callback(server.stop)
    like = published.like(CFG, engine.sharding)
    version, variables = engine_role.load_first(reader, like)
    number = engine_role.number(version)
    serving = engine_role.make_scheduler(config, engine, variables, number, KEY)
    stack.callback(serving.stop)
    serving.start()
    with engine_role.Follower(reader, version, serving, like) as follower:
      local.update_weights(init(0), 1)
      assert ask(serving, prompt).tokens.tolist() == ask(local, prompt).tokens.tolist()
      assert serving.stats()['handovers'] == 1
      publisher.publish(init(1), 1, 0)
      local.update_weights(init(1), 2)
      wait_until(lambda: follower.version.step == 1)
      wait_until(lambda: server.stats()['policy_version'] > number)
      prompt = prompt[::-1].copy()
      assert ask(serving, prompt).tokens.tolist() == ask(local, prompt).tokens.tolist()
      assert serving.stats()['handovers'] == 2
      server.stop()
      prompt = np.roll(prompt, 3)
      assert ask(serving, prompt).tokens.tolist() == ask(local, prompt).tokens.tolist()
      assert serving.stats()['handovers'] == 2
      assert serving.stats()['prefills_alone'] == 1


def test_the_run_is_watched(monkeypatch, tmp_path):
  """Storage that is away is waited for; a run that was started anew ends the role."""
  with published.Publisher(tmp_path / 'weights') as publisher:
    publisher.publish({'w': np.zeros(2)}, 0, 0)
  reader = published.Reader(tmp_path / 'weights')
  assert prefill_role.newest_serial(reader, 0) == 1
  with pytest.raises(RolloutsFailed, match='started anew'):
    prefill_role.newest_serial(reader, 2)

  def away():
    raise OSError('stale file handle')

  monkeypatch.setattr(reader, 'latest', away)
  assert prefill_role.newest_serial(reader, 2) == 2


def test_settings_are_checked(tmp_path):
  with pytest.raises(ValueError, match='RolesConfig.prefill_address=.*tcp:HOST:PORT'):
    RolesConfig(prefill_address='http://127.0.0.1:8104')
  load = prefill_role.load_number(published.Reader(tmp_path / 'weights'), None)
  with pytest.raises(LookupError, match='policy version 7'):
    load(7)
