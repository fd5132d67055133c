r"""Makes tasks from raw material: Harbor task directories, proved one by one.

python -m experiments.make_tasks --pipeline=swe --workdir=workdir/swe --config.count=100

Resumes after a stop; report.html in the workdir has counts, rates and examples.
docs/pipelines.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import warnings

from absl import flags

from experiments import common
from m2jax.sandbox import SandboxError
from m2jax.tasks import harbor
from m2jax.train.workdir import WorkdirError, open_workdir

with common.pipelines():
  from m2jax_pipelines import installed, llm, make
  from m2jax_pipelines.candidate import PipelineConfig
  from m2jax_pipelines.source import Tasks

PIPELINE = flags.DEFINE_string(
  'pipeline', None, 'Its name: short for --config=configs/make_tasks.py:NAME.'
)
_CONFIG = 'configs/make_tasks.py'
# What may differ when a run is continued, and its models: tasks say who wrote them.
_FREE = dict(count=1, parallel=1, backend='namespaces')
_MODELS = 'author', 'judge'


def main():
  config = common.build(PipelineConfig, common.values())
  workdir = common.workdir()
  models = {name: llm.LLMConfig() for name in _MODELS if hasattr(config, name)}
  settings = dataclasses.replace(config, **_FREE, **models)
  open_workdir(settings, workdir, common.FRESH.value)
  # Of packages' sources, when they are parsed.
  warnings.filterwarnings('ignore', category=SyntaxWarning, module='<unknown>')
  summary = asyncio.run(make.run(config, workdir))
  print(
    f'{summary.tasks} tasks in {workdir}, {summary.added} of them now, in '
    f'{summary.wall_s:.0f} s ({summary.wall_s / max(1, summary.added):.2f} s a task)\n'
    f'report: {workdir / "report.html"}'
  )
  if summary.tasks < config.count:
    print(f'no candidates are left: {summary.tasks} of {config.count} tasks')
  empty = [s for s in harbor.SPLITS if not Tasks(workdir, s)]
  if summary.tasks and empty:
    print(f'no task in {", ".join(empty)}: runs that use these do not start; make more')


def with_config(argv: list[str]) -> list[str]:
  """Adds --config if the arguments have only --pipeline."""
  if any(a.startswith('--config=') for a in argv):
    return argv
  names = [a.partition('=')[2] for a in argv if a.startswith('--pipeline=')]
  return [argv[0], f'--config={_CONFIG}:{names[-1]}', *argv[1:]] if names else argv


if __name__ == '__main__':
  sys.argv = with_config(sys.argv)
  common.run(main, WorkdirError, SandboxError, installed.SourceMissing)
