r"""Tasks made from raw material; docs/pipelines.md.

COMMAND: python -m experiments.make_tasks --pipeline=swe --workdir=workdir/swe \
           --config.count=100
HARDWARE: two CPU cores; the package registry, for sources.

The variant is the pipeline: a module of `m2jax_pipelines`, or any import path.
"""

import ml_collections

from experiments import fields
from m2jax_pipelines.candidate import PipelineConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.kind = variant or 'swe'
  return fields.complete(c, PipelineConfig)
