"""Pipelines: how tasks are made from raw material, and admitted.

A pipeline is a module that `m2jax.kinds` finds (`swe` of this package, an entry point
of the group `m2jax_pipelines`, or any import path):

    Config            a `candidate.PipelineConfig`
    candidates(config, context) -> async iterator of `Candidate`

`make.run` admits candidates until there are `count` tasks: it keeps near-duplicates
out, writes each as a Harbor task directory, proves it (`admission`), and appends a
record. docs/pipelines.md. Beside them, `suites` evaluates a model on any tasks, and
`tasks` has kinds of tasks.
"""
