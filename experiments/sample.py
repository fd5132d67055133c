r"""Rejection sampling: a model's verified trajectories on tasks, as chats for SFT.

  python -m experiments.sample --config=configs/sample.py --workdir=workdir/sample \
    --checkpoint=workdir/forge
  python -m experiments.sft --config=configs/sft.py --workdir=workdir/sft \
    --config.demonstrations=workdir/sample/verified.jsonl

With --url and --model in place of --checkpoint, the model of any OpenAI-compatible
server. The same command resumes after a stop. docs/pipelines_reasoning.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from experiments import common, endpoint
from m2jax import sandbox
from m2jax.checkpoint import CheckpointError
from m2jax.forge.errors import RolloutsFailed, Stopped
from m2jax.observe import console

with common.pipelines():
  from m2jax_pipelines import records, suites, verified

CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'A workdir or a directory of checkpoints.'
)
STEP = flags.DEFINE_integer('step', None, 'Checkpoint step; default: the latest.')


def main():
  values, workdir = common.values(), common.workdir()
  config = common.build(verified.SampleConfig, values['sample'], 'config.sample')
  model = endpoint.name(CHECKPOINT.value)
  workdir.mkdir(parents=True, exist_ok=True)
  paths = {name: workdir / f'attempts_{name}.jsonl' for name in config.scaffolds}
  for name, path in paths.items():
    suites.keep_settings(path, config.of(name), model, common.FRESH.value)
  with (
    endpoint.opened(values, CHECKPOINT.value, STEP.value) as found,
    console.progress() as bar,
  ):
    for name, path in paths.items():
      endpoint.run_suite(config.of(name), name, found, path, bar)
  rows = {name: records.read(path) for name, path in paths.items()}
  selection = verified.select(config, rows, model)
  verified.write(workdir / 'verified.jsonl', selection.chats)
  _report(workdir, model, selection)


def _report(workdir: Path, model: str, selection: verified.Selection) -> None:
  rows = [
    {'scaffold': scaffold, 'family': family, **counts}
    for (scaffold, family), counts in sorted(selection.counts.items())
  ]
  (workdir / 'sample.json').write_text(
    json.dumps({'model': model, 'rows': rows}, indent=2) + '\n'
  )
  print(f'\n{"scaffold":<16} {"family":<24} {"attempts":>8} {"kept":>6}  others')
  for (scaffold, family), counts in sorted(selection.counts.items()):
    others = ', '.join(
      f'{name} {n}' for name, n in counts.most_common() if name != verified.KEPT
    )
    print(
      f'{scaffold:<16} {family:<24} {counts.total():>8} {counts[verified.KEPT]:>6}  '
      f'{others}'
    )
  path = workdir / 'verified.jsonl'
  print(f'\n{len(selection.chats)} chats written to {path}')


if __name__ == '__main__':
  common.run(main, CheckpointError, sandbox.SandboxUnavailable, RolloutsFailed, Stopped)
