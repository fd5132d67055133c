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
      MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT='3',
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
  c = forge.get_config('smoke' if variant == 'smoke' else '')
  c.episodes.update(
    agent=mini_swe_agent(),
    concurrency=4,
  )
  return fields.complete(c, ForgeConfig)
