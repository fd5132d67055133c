"""What constrained decoding costs: tokens a second with and without grammars.

  python -m benchmarks.grammars [--requests=16] [--json]

Requests of equal length on a random tiny model, all without a grammar, half of them
with one (an array of integers that does not end), and all: tokens a second of each
kind, and the milliseconds on the host for the mask of a token. The median of --repeats
runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from m2jax import config, model
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving import grammars
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.text import tokenizer

_REQUESTS = flags.DEFINE_integer('requests', 16, 'of a batch', lower_bound=2)
_TOKENS = flags.DEFINE_integer('tokens', 128, 'of a response', lower_bound=2)
_REPEATS = flags.DEFINE_integer('repeats', 5, 'of each batch', lower_bound=1)
_JSON = flags.DEFINE_bool('json', False, 'prints JSON in place of a table')
_SCHEMA = {'type': 'array', 'items': {'type': 'integer'}, 'minItems': 1000}


class Timed:
  """A grammar whose masks are timed."""

  def __init__(self, grammar):
    self._grammar, self.seconds, self.masks = grammar, 0.0, 0

  def start(self):
    return _Matcher(self._grammar.start(), self)


class _Matcher:
  def __init__(self, matcher, timed: Timed):
    self._matcher, self._timed = matcher, timed

  def allow(self, mask):
    self._spend(self._matcher.allow, mask)
    self._timed.masks += 1

  def advance(self, tokens):
    self._spend(self._matcher.advance, tokens)

  def _spend(self, call, argument):
    begin = time.perf_counter()
    call(argument)
    self._timed.seconds += time.perf_counter() - begin


def measure(scheduler, tok, masked: int) -> dict[str, float]:
  """One batch, of which `masked` requests have a grammar."""
  text = grammars.json_response(_SCHEMA, None)
  grammar = Timed(grammars.Compiler(tok).compile(text))
  done: dict[bool, float] = {}
  begin = time.perf_counter()
  handles = []
  for i in range(_REQUESTS.value):
    # The first token ends the thinking; later the grammar does not allow it.
    bias = ((tok.think_end_id, 100.0 if i < masked else -100.0),)
    sampling = SamplingParams(_TOKENS.value, seed=i, logit_bias=bias)
    of = grammar if i < masked else None
    handle = scheduler.submit(GenerateRequest((1, 2, 3), sampling, of))
    handle.future.add_done_callback(
      lambda _, kind=of is not None: done.__setitem__(kind, time.perf_counter())
    )
    handles.append(handle)
  for handle in handles:
    assert len(handle.future.result().tokens) == _TOKENS.value
  rate = lambda kind, n: n * _TOKENS.value / (done[kind] - begin) if n else None
  return {
    'plain_tokens_s': rate(False, _REQUESTS.value - masked),
    'grammar_tokens_s': rate(True, masked),
    'mask_ms': 1e3 * grammar.seconds / grammar.masks if masked else None,
  }


def main(argv):
  del argv
  tok = tokenizer.train(['[1, 2, 3, 40, 500]'] * 8, 512)
  cfg = dataclasses.replace(config.tiny(), vocab_size=tok.vocab_size)
  engine_config = EngineConfig(
    slots=_REQUESTS.value, context_tokens=256, contexts=(256,), grammars=True
  )
  m2 = model.M2(cfg)
  variables = jax.jit(m2.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
  scheduler = Scheduler(Engine(cfg, engine_config), variables, 0, SchedulerConfig())
  scheduler.start()
  rows = []
  for masked in (0, _REQUESTS.value // 2, _REQUESTS.value):
    found = [measure(scheduler, tok, masked) for _ in range(_REPEATS.value + 1)][1:]
    middle = lambda values: None if None in values else statistics.median(values)
    row = {name: middle([each[name] for each in found]) for name in found[0]}
    rows.append({'requests': _REQUESTS.value, 'with_grammar': masked, **row})
  scheduler.stop()
  print(json.dumps(rows) if _JSON.value else table(rows))


def table(rows) -> str:
  """Markdown."""
  lines = ['| requests | with a grammar | tokens/s without | with | ms a mask |']
  lines.append('|' + '---|' * 5)
  show = lambda value, digits: '–' if value is None else f'{value:,.{digits}f}'
  for row in rows:
    rates = show(row['plain_tokens_s'], 0), show(row['grammar_tokens_s'], 0)
    cells = row['requests'], row['with_grammar'], *rates, show(row['mask_ms'], 3)
    lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
  return '\n'.join(lines)


if __name__ == '__main__':
  app.run(main)
