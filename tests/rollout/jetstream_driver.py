"""Runs JetStream's own Driver on our engine; writes what each got as JSON.

A process of its own: JetStream's threads SIGKILL theirs on any exception. Without
seqio, which brings TensorFlow, its tokenizers are missing; this has a tokenizer of its
own, and the driver, the engine's types and the messages are JetStream's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np

if importlib.util.find_spec('seqio') is None:
  missing = types.ModuleType('seqio.vocabularies')
  missing.Vocabulary = missing.SentencePieceVocabulary = type('Missing', (), {})
  sys.modules |= {'seqio': types.ModuleType('seqio'), 'seqio.vocabularies': missing}

from jetstream.core import orchestrator
from jetstream.core.proto import jetstream_pb2
from jetstream.engine import tokenizer_api

from m2jax.rollout.jetstream import adapter
from m2jax.rollout.jetstream.calls import EngineApi
from tests.rollout import conftest


class Ids(tokenizer_api.Tokenizer):
  """Token ids in, token ids out; nothing stops early."""

  pad_id, eos_id, bos_id = 0, -1, 1
  stop_tokens = frozenset()

  def encode(self, s, **kwargs):
    raise NotImplementedError

  def decode(self, token_ids, **kwargs):
    return str(token_ids)


async def main(prompts, max_tokens, out):
  variables = conftest.init(0)
  # The driver has no sampling parameters: sharp weights make its draws greedy.
  variables['params']['head'] = variables['params']['head'] * 1e5
  engine = adapter.JetStreamEngine(
    EngineApi(conftest.CFG, conftest.ENGINE_CONFIG), variables, Ids()
  )
  driver = orchestrator.Driver(
    prefill_engines=[engine],
    generate_engines=[engine],
    prefill_params=[engine.load_params()],
    generate_params=[engine.load_params()],
    interleaved_mode=True,
    jax_padding=False,
  )
  client = orchestrator.LLMOrchestrator(driver=driver)

  async def one(tokens):
    content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokens)
    request = jetstream_pb2.DecodeRequest(token_content=content, max_tokens=max_tokens)
    ids = []
    async for response in client.Decode(request):
      ids.extend(response.stream_content.samples[0].token_ids)
    return ids

  results = await asyncio.gather(*(one(p) for p in prompts))
  # JetStream's threads log to stdout: the answer goes to a file.
  Path(out).write_text(json.dumps([np.array(r).tolist() for r in results]))
  driver.stop()


asyncio.run(main(*json.loads(sys.argv[1])))
