r"""Forge end to end on a tiny M2: SFT on verified demonstrations, then RL.

COMMAND: make forge
     or: python -m experiments.forge --config=configs/forge.py --workdir=workdir/forge
HARDWARE: two CPU cores, 2 GB.
RESULT: the table of docs/results.md; its settings were chosen on the development
  split (docs/rl.md).

Variants: `:smoke` runs every phase for seconds, as a check. The controls take
`--config.start=RUN`, the workdir of a run of this config, and start from its SFT
weights: `:more_sft` continues SFT, `:expert_iteration` imitates the policy's own
successes, `:shuffled` shuffles the rewards within each group.
"""

import dataclasses

import ml_collections

from experiments import fields
from m2jax import config as model_config
from m2jax import sharding
from m2jax.forge.config import ForgeConfig

# Families of the demonstrations: single calls, and chains of two and three.
DEMONSTRATED = dict(steps_1=0.2, steps_2=0.3, steps_3=0.5)
# Families of RL and the evaluations: mostly chains that no demonstration contains.
ASKED = dict(
  steps_3=1.0, steps_4=1.0, steps_5=1.0, steps_6=1.0, trail=2.0, dead_end=2.0
)


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.model = dataclasses.asdict(model_config.tiny())
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))  # a device per core
  c.eval_tasks = 300  # held-out tasks per evaluation, one episode each
  c.dev_tasks = 210  # development tasks per evaluation after each phase
  c.start = ''  # workdir whose demonstrations, tokenizer and SFT weights are reused
  c.init_from = ''  # weights that SFT starts from, of a run or in the released format
  c.tasks = dict(
    kind='terminal',  # or an import path (docs/add_a_task.md)
    weights=ASKED,
  )
  c.teacher = dict(
    kind='terminal',
    scale=1.0,  # factor on the mistake rates; 0 is a perfect teacher
  )
  c.engine = dict(slots=64, context_tokens=768)
  c.gateway = dict(port=0)  # any free port
  c.episodes = dict(
    backend='namespaces',  # the sandbox; 'gvisor', or 'rlimit_only', which is weaker
    concurrency=64,  # maximum concurrent episodes
    agent=dict(kind='whitebox', max_tokens=96, observation_bytes=400, system='Use sh.'),
  )
  c.sft = dict(
    demonstrations=2500,
    families=DEMONSTRATED,
    loop=dict(steps=2000),
    optimizer=dict(
      name='muon',  # of the hidden matrices; or adam, sso, … (docs/optimizers.md)
      muon=dict(learning_rate=0.02),
      adam=dict(learning_rate=3e-3),
    ),
  )
  c.rl = dict(
    steps=48,
    seconds=0.0,  # no limit
    dev_every=10,  # updates between evaluations on the development split
    dev_tasks=105,
    patience=3,  # stop after this many evaluations without a new best
    groups_per_step=12,
    refill_factor=1.0,  # no more episodes than the controls have
    group_size=16,
    capacity=16,  # N, in groups
    window='default',  # W = 0.3 N
    partial_credit=0.5,  # maximum for a partly correct end state
    learner=dict(
      estimator=dict(kind='cispo'),  # or grpo, dapo, gspo, … (docs/rl.md)
      reward=dict(
        alpha=0.1,  # weight of the process reward: -1 for a malformed turn
        beta=0.0,  # weight of the speed reward: at most 1, for a success
      ),
    ),
    optimizer=dict(
      name='muon',
      muon=dict(learning_rate=5e-3),
      adam=dict(learning_rate=5e-4),
    ),
  )
  _tune(c)
  c.more_sft = None
  if variant == 'smoke':
    c.engine.update(decode_rows=(64,), contexts=(192, 384, 768))
    c.eval_tasks = c.dev_tasks = 8
    c.sft.update(demonstrations=60)
    c.sft.loop.update(steps=12, checkpoint_every=6)
    c.rl.update(
      steps=3,
      groups_per_step=2,
      refill_factor=3.0,  # so that most updates have something to train
      group_size=2,
      capacity=4,
      checkpoint_every=2,
      dev_every=2,
      dev_tasks=4,
      fail_on_mismatch=True,
    )
  elif variant == 'more_sft':
    c.more_sft = ml_collections.ConfigDict(
      dict(
        loop=dict(steps=5600, checkpoint_every=1400),  # as long as RL takes
        optimizer=c.sft.optimizer.to_dict(),
      )
    )
    c.more_sft.optimizer.schedule.update(total_steps=5600, decay_steps=1960)
    c.rl = None
  elif variant == 'expert_iteration':
    c.rl.learner.estimator.kind = 'expert_iteration'
  elif variant == 'shuffled':
    c.rl.learner.shuffle_rewards = True
  elif variant:
    raise ValueError(
      f'unknown variant {variant!r}: want smoke, more_sft, expert_iteration or shuffled'
    )
  return fields.complete(c, ForgeConfig)


def _tune(c: ml_collections.ConfigDict) -> None:
  """What was tuned for this job's sizes. Other fields, with their defaults, are
  documented in their dataclasses (`ForgeConfig` and those that it names)."""
  c.tasks.update(pseudo_names=1.0, pseudo_words=1.0, spare_calls=2)
  c.teacher.looks = 0.2  # probability of listing the files before a command
  c.engine.update(  # compiled shapes, a second each; a step costs what its shape does
    decode_rows=(16, 32, 64),
    contexts=(192, 320, 448, 768),
    prefill_shapes=((1, 64), (8, 32)),
    record_experts=False,  # True: rollouts record expert ids, and training replays them
  )
  c.scheduler = dict(decode_steps=8, reuse_stale_prefix=False)
  c.sft.update(
    tokens_per_step=2048,  # input tokens; within a group, merged
    row_tokens=1024,
    step=dict(micro_rows=2),
  )
  c.sft.loop.checkpoint_every = 500
  c.sft.optimizer.schedule = dict(
    kind='wsd', total_steps=2000, decay_steps=700, final_fraction=0.1
  )
  c.rl.update(
    item_deadline_s=300.0, checkpoint_every=16, curriculum=dict(floor=0.3, memory=64.0)
  )
  c.rl.learner.update(
    row_tokens=2048,  # most groups are one row
    row_terms=3072,
    step=dict(micro_rows=2, detach_mtp=True),  # a row per device
  )
  c.rl.optimizer.schedule = dict(
    kind='wsd', total_steps=48, decay_steps=24, final_fraction=0.1
  )
