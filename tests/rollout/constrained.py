"""A tiny model over a real vocabulary, for responses with a grammar."""

from __future__ import annotations

import dataclasses
import functools
import json

from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving import grammars
from m2jax.text import tokenizer
from tests import quick
from tests.rollout import conftest

TOK = tokenizer.train(['{"a": 1, "b": "x"} true false null'] * 8, 288)
CFG = dataclasses.replace(conftest.CFG, vocab_size=TOK.vocab_size, max_positions=128)
CONFIG = EngineConfig(
  slots=4,
  context_tokens=96,
  page_tokens=4,
  max_steps=4,
  decode_rows=(4,),
  prefill_shapes=((4, 8),),
  contexts=(96,),
  max_stop_ids=1,
  max_logit_bias=3,
  max_top_logprobs=4,
  grammars=True,
)
PROMPT = tuple(TOK.encode('count '))
# Else a random model thinks for ever, and writes strings without an end.
BIAS = ((TOK.think_end_id, 6.0), (TOK.eos_id, 20.0), (TOK.encode('"')[0], 4.0))
PAIR = {
  'type': 'object',
  'properties': {'a': {'type': 'boolean'}, 'b': {'enum': ['x', 'yes']}},
  'required': ['a', 'b'],
  'additionalProperties': False,
}


@functools.cache
def compiler() -> grammars.Compiler:
  return grammars.Compiler(TOK)


@functools.cache
def variables():
  return quick.variables(CFG, 1, noise=0.05, bias=0.1)


def grammar(schema, calls: bool = False):
  ids = (TOK.tool_call_id, TOK.tool_call_end_id) if calls else None
  return compiler().compile(grammars.json_response(schema, ids))


def request(schema=None, seed: int = 0, max_tokens: int = 80, **sampling):
  """With a grammar if there is a schema."""
  sampling = {'logit_bias': BIAS, 'stop_ids': (TOK.eos_id,), **sampling}
  params = SamplingParams(max_tokens, seed=seed, **sampling)
  of = grammar(schema) if schema is not None else None
  return GenerateRequest(PROMPT, params, of)


def content(result):
  """The JSON value after the thinking."""
  thinking, _, text = TOK.decode(result.tokens[:-1]).partition('</think>')
  assert '[e~[' not in thinking
  return json.loads(text)


class Biased:
  """A scheduler whose requests all have BIAS, which not every dialect can ask for."""

  def __init__(self, scheduler):
    self._scheduler = scheduler

  def __getattr__(self, name):
    return getattr(self._scheduler, name)

  def submit(self, request, on_tokens=None):
    sampling = dataclasses.replace(request.sampling, logit_bias=BIAS)
    request = dataclasses.replace(request, sampling=sampling)
    return self._scheduler.submit(request, on_tokens)
