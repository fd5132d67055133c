"""The main job behind an unmodified mini-swe-agent, end to end at smoke size."""

from __future__ import annotations

import json

import pytest

from configs import forge_blackbox
from experiments import common
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax.observe import metrics
from m2jax.pool.data_pool import DataPool
from tests.agents.environment import needs_environment


def config() -> ForgeConfig:
  """The smoke variant with a smaller model, which compiles in less time."""
  c = forge_blackbox.get_config('smoke')
  c.model.update(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16)
  c.model.update(rotary_dim=8, num_experts=4, expert_dim=16)
  c.mesh.expert = 1
  c.engine.update(
    slots=4,
    decode_rows=(4,),
    contexts=(768,),
    prefill_shapes=((1, 64), (4, 64)),
  )
  c.gateway.default_max_tokens = 16
  c.teacher.scale = 0.0
  c.sft.update(demonstrations=2)
  c.sft.loop.update(steps=2, checkpoint_every=2)
  c.rl.learner.step.micro_rows = 1
  c.eval_tasks = 1
  c.rl.update(steps=1, checkpoint_every=1, capacity=1)
  return common.build(ForgeConfig, c.to_dict())


@pytest.mark.long
@needs_environment
def test_the_main_job_trains_the_model_behind_the_agent(tmp_path):
  """Every phase runs; demonstrations are the agent's own chats; what the learner got is
  what the engine sampled, to rounding; and no episode is an infrastructure failure."""
  evaluations = run.run(config(), tmp_path)
  assert [row.stage for row in evaluations] == ['after SFT', 'after RL']
  lines = (tmp_path / 'demonstrations.jsonl').read_text().splitlines()
  demonstrations = [json.loads(line) for line in lines]
  assert len(demonstrations) == 2
  assert [d['success'] for d in demonstrations] == [1.0] * 2
  for d in demonstrations:
    assert [t['function']['name'] for t in d['tools']] == ['bash']
  [record] = metrics.read(tmp_path, 'rl')
  assert record['trajectories'] >= 2 and record['trajectories_masked'] == 0
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    group = pool.group(0)
    assert len(group) == 2
    for trajectory, completions in group:
      assert trajectory.end_reason in ('answer', 'exit', 'max_turns')
      assert completions and trajectory.messages[0]['content'] == 'Use bash.'
      for completion in completions:
        assert len(completion.response_ids) == len(completion.logprobs)
        assert (completion.logprobs <= 0).all()
