"""Serves a checkpoint by the gateway: an OpenAI-style HTTP server for any agent.

  python -m experiments.serve --config=configs/serve.py --checkpoint=workdir/forge \
    --port=8000

With --workdir it records what is sampled, within the bounds of `config.recorded`, and
takes episodes and their rewards over HTTP (`gateway.episodes_api`) with the key in
WORKDIR/keys/reward.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import shlex
import time
from typing import Any

import httpx
from absl import flags

from experiments import common, served
from m2jax.checkpoint import CheckpointError, policy
from m2jax.forge import prepare, shared
from m2jax.forge.config import ForgeConfig, RecordedConfig
from m2jax.forge.errors import RolloutsFailed, Stopped
from m2jax.forge.roles import in_process, outside
from m2jax.gateway.config import GatewayConfig
from m2jax.pool.data_pool import DataPool, PoolBroken
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.sharding import MeshConfig
from m2jax.tasks import demonstrations

CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'A workdir or a directory of checkpoints.'
)
STEP = flags.DEFINE_integer('step', None, 'Checkpoint step; default: the latest.')
PORT = flags.DEFINE_integer('port', None, 'Overrides config.gateway.port.')

_CALL = """curl {base_url}/chat/completions -H 'Authorization: Bearer any-key' \\
  -H 'Content-Type: application/json' \\
  -d {body}
from Python: openai.OpenAI(base_url='{base_url}', api_key='any-key')"""
_BEGIN = """curl {base_url}/episodes -d '{{"task": "NAME"}}' \\
  -H "Authorization: Bearer $(cat {reward})"  # gives a key (docs/agents.md)"""


def main():
  values = common.values()
  if not CHECKPOINT.value:
    raise common.BadInput('--checkpoint is missing: give the workdir of a run')
  if PORT.value is not None:
    values['gateway']['port'] = PORT.value
  gateway = common.build(GatewayConfig, values['gateway'], 'config.gateway')
  engine = common.build(EngineConfig, values['engine'], 'config.engine')
  scheduler = common.build(SchedulerConfig, values['scheduler'], 'config.scheduler')
  mesh = common.build(MeshConfig, values['mesh'], 'config.mesh')
  recorded = common.build(RecordedConfig, values.get('recorded', {}), 'config.recorded')
  if not gateway.accept_unknown_keys and not common.WORKDIR.value:
    raise common.BadInput(
      'config.gateway.accept_unknown_keys=False without --workdir: nobody would have '
      'a key. Give --workdir: with its keys/reward agents begin episodes, and get '
      'their keys (docs/agents.md)'
    )
  common.start(mesh)
  common.join_processes()
  sharding = common.make_sharding(mesh)
  found = served.load(CHECKPOINT.value, STEP.value, sharding, engine.weights_dtype)
  with served.engine(found, engine, sharding) as running:
    if running is not None:  # else this is not process 0
      _serve(found, running, scheduler, gateway, recorded)


def _serve(
  found: policy.Policy,
  engine: Any,
  scheduler: SchedulerConfig,
  gateway: GatewayConfig,
  recorded: RecordedConfig,
) -> None:
  """Serves until Ctrl-C, or SIGTERM, after which a scheduler has to restart it.

  Raises:
    RolloutsFailed: the engine has stopped.
    PoolBroken: the database cannot be written any more.
  """
  tok = found.load_tokenizer()
  with contextlib.ExitStack() as stack:
    record, open_episodes = lambda completion: None, lambda server: None
    taken: list[outside.Recorded] = []
    if common.WORKDIR.value:  # record what is sampled
      workdir = common.workdir()
      workdir.mkdir(parents=True, exist_ok=True)
      url = f'sqlite:///{workdir.absolute()}/served.db'
      pool = stack.enter_context(DataPool(url))
      record = pool.add_completion
      view, reward = (shared.make_key(workdir, n) for n in (shared.VIEW, shared.REWARD))

      def open_episodes(server):
        taken.append(outside.Recorded(pool, server.sessions, recorded))
        server.take_episodes(taken[0], reward)
        server.show_to(view)

    serving = in_process.serving(
      *(engine, scheduler, gateway, found.variables, tok, record),
      before_start=open_episodes,
    )
    try:
      running, server = stack.enter_context(serving)
    except OSError as error:
      raise common.BadInput(f'{gateway.host}:{gateway.port}: {error}') from error
    request = {'model': gateway.model_name, **_example(found), 'temperature': 0}
    body = shlex.quote(json.dumps(request))
    try:
      print(f'serving step {found.step} of {found.directory} at {server.base_url}')
      call = _CALL if gateway.accept_unknown_keys else _BEGIN
      key = f'{common.WORKDIR.value}/{shared.KEYS_DIR}/{shared.REWARD}'
      print(call.format(base_url=server.base_url, body=body, reward=key))
      if not common.WORKDIR.value:  # else it would be recorded
        print('it answers', _answer(server.base_url, request))
      print('Ctrl-C stops it.', flush=True)
      cleaned_s = time.monotonic()
      while running.alive:
        time.sleep(1.0)
        if taken and time.monotonic() - cleaned_s >= recorded.every_s:
          taken[0].clean()
          cleaned_s = time.monotonic()
      raise RolloutsFailed(f'the rollout engine has stopped: {running.stopped_reason}')
    except KeyboardInterrupt:
      common.check_stopped()
  print('\nstopped')


def _answer(base_url: str, request: dict[str, Any]) -> str:
  """The message that the server answers with, or its error."""
  found = httpx.post(
    f'{base_url}/chat/completions',
    json=request,
    headers={'Authorization': 'Bearer any-key'},
    timeout=None,
  ).json()
  choices = found.get('choices')
  return json.dumps(choices[0]['message'] if choices else found)


def _example(found: policy.Policy) -> dict[str, Any]:
  """A request that the policy has learned to answer: that of a demonstration of its
  run, as the run's agent makes it. A greeting, if it is of no such run."""
  workdir = pathlib.Path(found.directory).parent
  with contextlib.suppress(OSError, ValueError):
    settings = json.loads((workdir / 'config.json').read_text('utf-8'))
    config = common.build(ForgeConfig, settings)
    demos = demonstrations.read(workdir / prepare.DEMONSTRATIONS)
    (chat,) = prepare.chats(config, demos[:1])
    asked = itertools.takewhile(lambda m: m['role'] != 'assistant', chat.messages)
    return {'messages': list(asked), 'tools': list(chat.tools)}
  return {'messages': [{'role': 'user', 'content': 'Hello'}]}


if __name__ == '__main__':
  errors = CheckpointError, RolloutsFailed, Stopped, PoolBroken
  common.run(main, *errors, distributed=True)
