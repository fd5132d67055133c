"""`experiments.evaluate --suite=NAME`: a suite against a URL or a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from rich.progress import Progress

from experiments import common, served
from m2jax.forge import roles
from m2jax.gateway.config import GatewayConfig
from m2jax.pipelines import suites
from m2jax.rollout.engine_config import EngineConfig
from m2jax.rollout.scheduler import SchedulerConfig
from m2jax.sharding import MeshConfig

SUITE = flags.DEFINE_string('suite', None, 'A suite of configs/suites.py.')
URL = flags.DEFINE_string('url', None, 'OpenAI-compatible server, with /v1.')
MODEL = flags.DEFINE_string('model', None, 'Name of the model at --url.')
KEY = flags.DEFINE_string(
  'key_variable', 'OPENAI_API_KEY', 'Environment variable with the API key.'
)
_CONFIG = 'configs/suites.py'


def with_config(argv: list[str]) -> list[str]:
  """Adds --config if the arguments have --suite without it."""
  names = [a.partition('=')[2] for a in argv if a.startswith('--suite=')]
  if not names or any(a.startswith('--config=') for a in argv):
    return argv
  return [argv[0], f'--config={_CONFIG}:{names[-1]}', *argv[1:]]


def main(checkpoint: str | None, step: int | None) -> None:
  """Runs the suite, prints its table and writes it."""
  values, workdir = common.values(), common.workdir()
  config = common.build(suites.SuiteConfig, values['suite'], 'config.suite')
  if bool(URL.value) == bool(checkpoint):
    raise common.BadInput('give --url and --model, or --checkpoint')
  if URL.value and not MODEL.value:
    raise common.BadInput('--model is missing: the name of the model at --url')
  workdir.mkdir(parents=True, exist_ok=True)
  about = {'model': MODEL.value if URL.value else str(checkpoint)}
  path = workdir / f'{SUITE.value}.jsonl'
  _same_settings(workdir / f'{SUITE.value}.settings.json', path, config, about)
  if URL.value:
    key = os.environ.get(KEY.value, 'none')
    rows = _run(config, URL.value, MODEL.value, path, key)
  else:
    with _serving(values, checkpoint, step) as (base_url, model):
      rows = _run(config, base_url, model, path, 'evaluation')
  _report(workdir, about, rows)


def _same_settings(settings: Path, path: Path, config, about: dict) -> None:
  """Keeps the settings of a run; refuses to continue it with others."""
  now = json.dumps({**about, 'suite': json.loads(suites.digest(config))}, indent=2)
  if common.FRESH.value:
    path.unlink(missing_ok=True)
  elif path.exists() and settings.exists() and settings.read_text() != now:
    raise common.BadInput(
      f'{path} was made with other settings ({settings}): --fresh starts anew'
    )
  settings.write_text(now)


@contextlib.contextmanager
def _serving(values, checkpoint: str, step: int | None) -> Iterator[tuple[str, str]]:
  """(base URL, model) of a gateway on a checkpoint; takes a free port."""
  gateway = common.build(
    GatewayConfig, {**values['gateway'], 'port': 0}, 'config.gateway'
  )
  engine = common.build(EngineConfig, values['engine'], 'config.engine')
  scheduler = common.build(SchedulerConfig, values['scheduler'], 'config.scheduler')
  mesh = common.build(MeshConfig, values['mesh'], 'config.mesh')
  common.virtual_devices(mesh)
  sharding = common.make_sharding(mesh)
  found = served.load(checkpoint, step, sharding, engine.weights_dtype)
  with (
    served.engine(found, engine, sharding) as running,
    roles.serving(
      *(running, scheduler, gateway, found.variables, found.load_tokenizer()),
      lambda completion: None,
    ) as (_, server),
  ):
    yield server.base_url, gateway.model_name


def _run(config, base_url: str, model: str, path: Path, key: str) -> list[suites.Row]:
  total = len(config.specs()) * config.trials
  with Progress() as bar:
    line = bar.add_task(SUITE.value, total=total)
    return asyncio.run(
      suites.run(
        config,
        base_url,
        model,
        path,
        api_key=key,
        on_end=lambda row: bar.advance(line),
      )
    )


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
