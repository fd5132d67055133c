"""The model of a job: a server of the OpenAI protocol, or a checkpoint served here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rich.progress
from absl import flags, logging

from experiments import common, served
from m2jax import agents
from m2jax.forge.roles import in_process
from m2jax.gateway.config import GatewayConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.sharding import MeshConfig

if typing.TYPE_CHECKING:
  from m2jax_pipelines import suites

URL = flags.DEFINE_string('url', None, 'OpenAI-compatible server, with /v1.')
MODEL = flags.DEFINE_string('model', None, 'Name of the model at --url.')
KEY = flags.DEFINE_string(
  'key_variable', 'OPENAI_API_KEY', 'Environment variable with the API key.'
)


def name(checkpoint: str | None) -> str:
  """The model's name in results.

  Raises:
    BadInput: not exactly one of --url with --model and a checkpoint.
  """
  if bool(URL.value) == bool(checkpoint):
    raise common.BadInput('give --url and --model, or --checkpoint')
  if URL.value and not MODEL.value:
    raise common.BadInput('--model is missing: the name of the model at --url')
  return MODEL.value if URL.value else str(checkpoint)


@contextlib.contextmanager
def opened(
  values: dict[str, Any], checkpoint: str | None, step: int | None
) -> Iterator[agents.Endpoint]:
  """The server of --url, or a gateway on the checkpoint, at a free port.

  Args:
    values: the config; a checkpoint needs `engine`, `scheduler`, `gateway` and `mesh`.
    checkpoint: a workdir or a directory of checkpoints.
    step: the checkpoint's step; None is the latest.
  """
  if URL.value:
    yield agents.Endpoint(URL.value, os.environ.get(KEY.value, 'none'), MODEL.value)
    return
  options = {**values['gateway'], 'port': 0}
  gateway = common.build(GatewayConfig, options, 'config.gateway')
  engine = common.build(EngineConfig, values['engine'], 'config.engine')
  scheduler = common.build(SchedulerConfig, values['scheduler'], 'config.scheduler')
  mesh = common.build(MeshConfig, values['mesh'], 'config.mesh')
  common.start(mesh)
  sharding = common.make_sharding(mesh)
  found = served.load(checkpoint, step, sharding, engine.weights_dtype)
  with (
    served.engine(found, engine, sharding) as running,
    in_process.serving(
      *(running, scheduler, gateway, found.variables, found.load_tokenizer()),
      lambda completion: None,
    ) as (_, server),
  ):
    yield agents.Endpoint(server.base_url, 'evaluation', gateway.model_name)


def run_suite(
  config: suites.SuiteConfig,
  name: str,
  found: agents.Endpoint,
  path: Path,
  bar: rich.progress.Progress,
) -> list[suites.Row]:
  """`suites.run` with the model; shows progress, and why attempts are not judged."""
  from m2jax_pipelines import records, suites

  done = sum(row['outcome'] == 'judged' for row in records.read(path))
  total = len(config.specs()) * config.trials
  line = bar.add_task(name, total=total, completed=min(done, total))
  errors = []

  def on_end(row: Mapping[str, Any]) -> None:
    bar.advance(line)
    if row['outcome'] != 'judged':
      errors.append(row['error'])

  rows = asyncio.run(
    suites.run(
      config,
      found.base_url,
      found.model,
      path,
      api_key=found.api_key,
      on_end=on_end,
    )
  )
  if errors:
    logging.warning(
      '%s: %d attempts are not judged, the last for %s; the same command tries again',
      *(name, len(errors), errors[-1]),
    )
  return rows
