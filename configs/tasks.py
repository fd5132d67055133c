r"""How `experiments.tasks` runs the tasks of a dataset.

COMMAND: python -m experiments.tasks check DATASET --workdir=workdir/check
HARDWARE: two CPU cores; 1 GB for each job.
RESULT: a line a task, and a table of causes; check.jsonl in the workdir.

`tasks.containers` are the settings of containers, as in every job on such tasks:
docs/harbor.md. `limits` are those of a container whose task.toml has none.
"""

import ml_collections

from configs import suites
from experiments import fields
from m2jax import sandbox
from m2jax.tasks import harbor


def get_config() -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.tasks = fields.complete(
    ml_collections.ConfigDict(dict(kind='harbor')), harbor.Config
  )
  limits = dict(suites.SUITES['harbor']['limits'])
  c.limits = fields.complete(ml_collections.ConfigDict(limits), sandbox.Limits)
  return c
