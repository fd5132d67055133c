r"""The gateway on a checkpoint of a tiny M2, for any agent that speaks OpenAI's HTTP.

COMMAND: python -m experiments.serve --config=configs/serve.py \
           --checkpoint=workdir/forge --port=8000
HARDWARE: two CPU cores.
RESULT: prints the base URL and a call to try; Ctrl-C stops it. With --workdir the
  completions are kept in its served.db, with the rewards of episodes that agents begin
  and end over HTTP (docs/agents.md).

The model and the tokenizer are the checkpoint's. Any API key is a session of its own.
To listen beyond loopback set `gateway.accept_unknown_keys=False` too: the keys are then
those of the episodes that the holder of WORKDIR/keys/reward begins.

The engine runs on `mesh`, with --distributed in several processes (docs/rl.md).
"""

import dataclasses

import ml_collections

from experiments import fields
from m2jax import sharding
from m2jax.forge.config import RecordedConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving.config import SchedulerConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant:
    raise ValueError(f'unknown variant {variant!r}: there is none')
  c = ml_collections.ConfigDict()
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))  # a device per core
  c.gateway = dict(
    model_name='m2jax',
    host='127.0.0.1',
    port=8000,  # 0 takes a free one
    accept_unknown_keys=True,
    default_max_tokens=256,
  )
  c.engine = dict(
    slots=8,  # sequences at once
    context_tokens=768,  # prompt and response
    decode_rows=(1, 8),
    contexts=(128, 768),  # few shapes: each takes seconds to compile
    prefill_shapes=((1, 16), (1, 256), (4, 64)),
    max_top_logprobs=20,
    grammars=True,  # response_format, with llguidance; shapes of their own to compile
  )
  c.scheduler = dict(decode_steps=8)
  c.recorded = dict(  # with --workdir: what its served.db keeps, by whole sessions
    keep_s=30 * 86_400.0,
    keep_sessions=100_000,
    keep_bytes=4 << 30,  # of token ids
    idle_s=6 * 3600.0,  # without a request, a session or an episode ends
  )
  fields.complete(c.gateway, GatewayConfig)
  fields.complete(c.engine, EngineConfig)
  fields.complete(c.scheduler, SchedulerConfig)
  fields.complete(c.recorded, RecordedConfig)
  return c
