r"""Forge on environments that others published: `verifiers` and OpenEnv, in one door.

COMMAND: python -m experiments.forge --config=configs/environments.py:verifiers \
           --config.tasks.env=ID --config.tasks.python=DIR/bin/python \
           --config.sft.recorded=CHATS --workdir=workdir/environments
     or: python -m experiments.forge --config=configs/environments.py:openenv \
           --config.tasks.url=http://127.0.0.1:8000 \
           --config.sft.recorded=CHATS --workdir=workdir/environments
HARDWARE: two CPU cores, 4 GB.
RESULT: not measured.

SFT learns from recorded chats (`CHATS`, JSON lines with `messages` and `tools`) or,
where one script solves every task, from `--config.teacher.script`. The variants
`:verifiers_smoke` and `:openenv_smoke` run every phase for a few episodes, as a check,
with a script on the environments that docs/environments.md names.
"""

import dataclasses

import ml_collections

from configs import forge
from experiments import fields
from m2jax import config as model_config
from m2jax.forge.config import ForgeConfig

# Environments of a few lines, that ship with the two packages; docs/environments.md.
COUNTER = (
  '[{"tool": "counter_bump", "thought": "one"}, '
  '{"tool": "counter_bump", "thought": "two"}, {"content": "done"}]'
)
ECHO = (
  '[{"tool": "step", "arguments": {"message": "a"}, "thought": "short"}, '
  '{"tool": "step", "arguments": {"message": "0123456789"}}, {"content": "done"}]'
)


def get_config(variant: str = 'verifiers') -> ml_collections.ConfigDict:
  kind, _, smoke = variant.partition('_')
  if kind not in ('verifiers', 'openenv') or smoke not in ('', 'smoke'):
    raise ValueError(
      f'unknown variant {variant!r}: want verifiers, openenv, or one with _smoke'
    )
  c, layers = forge.get_config(smoke), 1 if smoke else 2
  c.model = dataclasses.asdict(
    dataclasses.replace(model_config.tiny(), num_layers=layers)
  )
  c.mesh.expert = 1
  del c.tasks, c.teacher
  c.tasks = dict(kind=kind, max_turns=6)
  c.teacher = dict(kind=kind)
  c.episodes.concurrency = 8  # of verifiers, a task's tool servers are processes
  c.episodes.agent.update(system='Use the tools.', max_tokens=64)
  c.rl.partial_credit = 0.0
  c.sft.families = {}
  if smoke:  # few episodes: of verifiers, each starts a process that imports it
    c.engine.update(slots=8, decode_rows=(8,), contexts=(512,), context_tokens=512)
    c.eval_tasks, c.dev_tasks = 0, 1
    c.sft.update(demonstrations=2, tokens_per_step=512, row_tokens=512)
    c.sft.loop.update(steps=24, checkpoint_every=24)
    c.rl.update(steps=2, max_items=2, groups_per_step=1, group_size=3, capacity=1)
    c.rl.update(dev_every=0, refill_factor=1.0)
    c.rl.learner.update(row_tokens=1024, row_terms=1024)
    # So short an SFT leaves texts that differ; successes differ in their time, too.
    c.rl.learner.reward.beta = 0.1
    if kind == 'verifiers':
      c.tasks.update(env='counter-tool-v1', shared=True)
      c.teacher.script = COUNTER
    else:
      c.tasks.update(url='http://127.0.0.1:8000', rewards='last', max_turns=3)
      c.teacher.script = ECHO
  return fields.complete(c, ForgeConfig)
