"""Pipelines: how tasks are made from raw material, and admitted.

A pipeline is a module that `m2jax.kinds` finds (`swe` of this package, an entry point
of the group `m2jax_pipelines`, or any import path):

    Config            a `pipelines.PipelineConfig`
    candidates(config, context) -> async iterator of `Candidate`

`make.run` admits candidates until there are `count` tasks: it keeps near-duplicates
out, writes each as a Harbor task directory, proves it (`admission`), and appends a
record. docs/pipelines.md.
"""

from m2jax_pipelines.candidate import Candidate, PipelineConfig
from m2jax_pipelines.context import Context
from m2jax_pipelines.make import run
from m2jax_pipelines.source import Tasks

__all__ = ['Candidate', 'Context', 'PipelineConfig', 'Tasks', 'run']
