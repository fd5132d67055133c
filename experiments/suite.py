"""`experiments.evaluate --suite=NAME`: a suite against a URL or a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path

from absl import flags

from experiments import common, endpoint
from m2jax.observe import console

if typing.TYPE_CHECKING:
  from m2jax_pipelines import suites

SUITE = flags.DEFINE_string('suite', None, 'A suite of configs/suites.py.')
_CONFIG = 'configs/suites.py'


def with_config(argv: list[str]) -> list[str]:
  """Adds --config if the arguments have --suite without it."""
  names = [a.partition('=')[2] for a in argv if a.startswith('--suite=')]
  if not names or any(a.startswith('--config=') for a in argv):
    return argv
  return [argv[0], f'--config={_CONFIG}:{names[-1]}', *argv[1:]]


def main(checkpoint: str | None, step: int | None) -> None:
  """Runs the suite, prints its table and writes it."""
  from m2jax_pipelines import suites

  values, workdir = common.values(), common.workdir()
  config = common.build(suites.SuiteConfig, values['suite'], 'config.suite')
  about = {'model': endpoint.name(checkpoint)}
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / f'{SUITE.value}.jsonl'
  suites.keep_settings(path, config, about['model'], common.FRESH.value)
  with endpoint.opened(values, checkpoint, step) as found, console.progress() as bar:
    rows = endpoint.run_suite(config, SUITE.value, found, path, bar)
  _report(workdir, about, rows)


def _report(workdir: Path, about: dict, rows: list[suites.Row]) -> None:
  path = workdir / f'{SUITE.value}.json'
  table = [dataclasses.asdict(row) for row in rows]
  path.write_text(json.dumps({**about, 'suite': SUITE.value, 'rows': table}, indent=2))
  print(f'\n{SUITE.value}: {about["model"]}')
  print(f'{"family":<24} {"success":>7}  95 % interval    tasks attempts not judged')
  for row in rows:
    print(
      f'{row.family:<24} {row.success:>7.3f}  [{row.low:.3f}, {row.high:.3f}]  '
      f'{row.tasks:>5} {row.attempts:>8} {row.failures:>10}'
    )
  print(f'\nwritten to {path}')
