r"""The main job behind an unmodified agent: mini-swe-agent, as it comes from PyPI.

COMMAND: pip install mini-swe-agent mcp
         python -m experiments.forge --config=configs/forge_blackbox.py \
           --workdir=workdir/blackbox
HARDWARE: two CPU cores; an episode costs seconds of a core, most of it the agent's
  imports.

The agent runs as a command in each task's sandbox and reaches the gateway through its
episode's relay only (docs/agents.md). Its prompt templates are configuration, and
short here for a tiny model; its loop, its tool `bash` and its client are its own. The
demonstrations of SFT are made by running it with a scripted author behind the gateway.

Variants: `:smoke` runs every phase for seconds, as a check; `:whitebox` has the
white-box agent on the same tasks with the same budget, to compare with.
"""

import sys

import ml_collections

from configs import forge
from experiments import fields
from m2jax.forge.config import ForgeConfig

MAX_STEPS = 9

# {{ … }} are mini-swe-agent's templates. An observation is that of the white-box agent.
_TEMPLATES = """\
agent:
  system_template: Use bash.
  instance_template: "{{task}}"
  step_limit: %d
  cost_limit: 0
  output_path: /tmp/run.json
model:
  observation_template: >-
    {%% set text = output.output.strip() %%}{{ text[:160] }}
    {%%- if not text and output.returncode %%}exit {{ output.returncode }}{%% endif %%}
  format_error_template: "error: {{ error }}"
environment:
  timeout: 5
"""

# Prints what the agent submitted.
_COMMAND = """\
cat > /tmp/mini.yaml <<'END'
%sEND
mini -y --exit-immediately --agent-class default -m openai/$MODEL -c /tmp/mini.yaml \\
  -t "$TASK" -o /tmp/run.json > /tmp/log 2>&1 || { tail -c 2000 /tmp/log >&2; exit 1; }
python -c '
import json
print(json.load(open("/tmp/run.json"))["info"]["submission"])
'
"""


def mini_swe_agent(environment: str = sys.prefix) -> dict:
  """Settings of the agent.

  Args:
    environment: the virtual environment that it is installed in.
  """
  return dict(
    kind='blackbox',
    command=_COMMAND % (_TEMPLATES % MAX_STEPS),
    read_only=(environment,),
    environment=dict(
      MSWEA_CONFIGURED='true',
      MSWEA_SILENT_STARTUP='1',
      MSWEA_COST_TRACKING='ignore_errors',
      MSWEA_GLOBAL_CONFIG_DIR='/tmp/mini',
      MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT='1',  # a failed gateway masks
      LITELLM_LOCAL_MODEL_COST_MAP='True',  # it would ask the network
    ),
    author=dict(
      rename=dict(sh='bash', cmd='command'),
      submit='echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {answer}',
      submit_tool='bash',
      submit_argument='command',
    ),
  )


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in ('', 'smoke', 'whitebox'):
    raise ValueError(f'unknown variant {variant!r}: want smoke or whitebox')
  c = forge.get_config('smoke' if variant == 'smoke' else '')
  c.teacher.malformed_call = 0.0  # the agent answers one with a message of the user
  c.gateway.default_max_tokens = c.episodes.agent.max_tokens  # it sends no limit
  if variant != 'whitebox':
    del c.episodes.agent
    c.episodes.agent = mini_swe_agent()
    c.episodes.concurrency = 4  # an episode takes a core for seconds
    c.episodes.limits.update(cpu_s=30, wall_s=120.0, memory_bytes=1 << 30)
  c.tasks.weights = forge.DEMONSTRATED
  c.eval_tasks, c.dev_tasks = 100, 0
  c.sft.demonstrations = 600
  c.rl.update(steps=16, groups_per_step=4, group_size=8, capacity=8, refill_factor=3.0)
  c.rl.update(dev_every=0, patience=0, item_deadline_s=900.0)
  c.rl.optimizer.schedule.update(total_steps=16, decay_steps=8)
  if variant == 'smoke':
    c.eval_tasks = 2
    c.sft.update(demonstrations=6)
    c.rl.update(steps=2, groups_per_step=1, group_size=2, capacity=2, refill_factor=1.0)
  return fields.complete(c, ForgeConfig)
