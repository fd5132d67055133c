"""Responses with a grammar: what is drawn, from which distribution, and what it costs
others."""

from __future__ import annotations

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import model
from m2jax.rollout.api import GrammarError
from m2jax.rollout.engine import sampling
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving import grammars
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.text import chat, tokenizer
from tests.rollout import constrained
from tests.rollout.conftest import log_softmax
from tests.rollout.constrained import CFG, CONFIG, PAIR, PROMPT, TOK, content, request

TIMEOUT_S = 120


def start(config=CONFIG, cfg=CFG, variables=None):
  variables = variables or constrained.variables()
  settings_ = SchedulerConfig(decode_steps=4)
  return Scheduler(Engine(cfg, config), variables, 0, settings_).start(warmup=False)


@pytest.fixture(scope='module')
def scheduler():
  """Of half the pages that four sequences of a whole context need."""
  running = start(dataclasses.replace(CONFIG, pages=1 + 48))
  yield running
  running.stop()


def run(scheduler, *requests, **kwargs):
  handles = [scheduler.submit(each, **kwargs) for each in requests]
  return [handle.future.result(TIMEOUT_S) for handle in handles]


def allowed(matcher) -> np.ndarray:
  """[V] bool."""
  mask = np.zeros(-(-TOK.vocab_size // 32), np.int32)
  matcher.allow(mask)
  bits = np.unpackbits(mask.view(np.uint8), bitorder='little')
  return bits[: TOK.vocab_size].astype(bool)


schemas = st.recursive(
  st.sampled_from(
    [
      {'type': 'boolean'},
      {'type': 'null'},
      {'type': 'integer', 'minimum': -3, 'maximum': 40},
      {'type': 'string', 'maxLength': 4},
      {'type': 'string', 'pattern': '^[a-c]{1,3}$'},
      {'enum': ['a', 1, None, 'é']},
      {'const': {'k': []}},
    ]
  ),
  lambda inner: st.one_of(
    st.builds(
      lambda items, n: {'type': 'array', 'items': items, 'maxItems': n},
      inner,
      st.integers(0, 2),
    ),
    st.builds(
      lambda of, n: {
        'type': 'object',
        'properties': of,
        'required': sorted(of)[:n],
        'additionalProperties': False,
      },
      st.dictionaries(st.sampled_from('xyz'), inner, max_size=2),
      st.integers(0, 2),
    ),
    st.builds(lambda *of: {'anyOf': list(of)}, inner, inner),
  ),
  max_leaves=4,
)


@given(schemas, st.integers(0, 2**31))
def test_finished_responses_are_of_the_schema(scheduler, schema, seed):
  """A random model at temperature 1: whatever it would rather say."""
  results = run(scheduler, *(request(schema, seed + i) for i in range(4)))
  for result in results:
    if result.finish_reason == 'stop':
      jsonschema.validate(content(result), schema)
    else:
      assert result.finish_reason == 'length'


def test_most_responses_finish(scheduler):
  """Else the test above would prove nothing; and thinking is free until it ends."""
  results = run(scheduler, *(request(PAIR, seed) for seed in range(12)))
  finished = [result for result in results if result.finish_reason == 'stop']
  assert len(finished) >= 8
  assert {content(result)['b'] for result in finished} == {'x', 'yes'}
  assert len({tuple(result.tokens[:2].tolist()) for result in results}) > 2


@pytest.mark.parametrize('truncation', [{}, {'top_k': 7}, {'temperature': 0.7}])
def test_logprobs_are_of_the_masked_distribution(scheduler, truncation):
  """π_old is renormalised over the allowed tokens, before truncation: against a full
  forward pass (law 4)."""
  m2, longest = jax.jit(model.M2(CFG).apply), CONFIG.context_tokens
  bias = np.zeros(TOK.vocab_size)
  for token, value in constrained.BIAS:
    bias[token] = value
  for seed in range(3):
    (result,) = run(scheduler, request(PAIR, seed, **truncation))
    tokens = [*PROMPT, *result.tokens.tolist()]
    padded = np.zeros((1, longest), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.float64(m2(constrained.variables(), padded)[0]) + bias
    matcher = constrained.grammar(PAIR).start()
    for i, token in enumerate(result.tokens.tolist()):
      may = allowed(matcher)
      row = np.where(may, logits[len(PROMPT) + i - 1], -np.inf)
      row /= truncation.get('temperature', 1.0)
      if top_k := truncation.get('top_k'):
        row[row < np.sort(row)[-top_k]] = -np.inf
      assert may[token]
      np.testing.assert_allclose(result.logprobs[i], log_softmax(row)[token], atol=2e-4)
      matcher.advance([token])


def test_constrain_keeps_exactly_the_tokens_of_the_mask():
  """Bit i % 32 of word i // 32, the sign bit included."""
  rng = np.random.default_rng(0)
  may = rng.random((3, 70)) < 0.5
  mask = np.packbits(np.pad(may, ((0, 0), (0, 26))), axis=1, bitorder='little')
  logits = rng.normal(size=(3, 70)).astype(np.float32)
  got = sampling.constrain(jnp.asarray(logits), jnp.asarray(mask.view(np.int32)))
  np.testing.assert_array_equal(got, np.where(may, logits, -np.inf))


def test_neighbours_with_a_grammar_change_nothing(scheduler):
  """Rows without a grammar draw what they draw alone, several steps a call."""
  plain = [request(None, seed, max_tokens=24) for seed in range(3)]
  alone = run(scheduler, *plain)
  before = scheduler.stats()
  mixed = run(scheduler, *plain, request(PAIR, 5))[:3]
  for one, other in zip(alone, mixed, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
  after, steps = scheduler.stats(), sum(len(result.tokens) for result in mixed)
  assert after['decode_calls'] - before['decode_calls'] < steps + 80
  calls = scheduler.stats()['decode_calls']
  run(scheduler, request(None, 9, max_tokens=16, logit_bias=()))
  assert scheduler.stats()['decode_calls'] - calls <= 5  # four steps each


def test_retraction_goes_on_in_the_grammar(scheduler):
  """Too few pages: a response that loses its own draws the same tokens."""
  requests = [request(PAIR, seed, logit_bias=BUSY) for seed in range(4)]
  want = [run(scheduler, each)[0] for each in requests]
  before = scheduler.stats()['retractions']
  got = run(scheduler, *requests)
  assert scheduler.stats()['retractions'] > before
  for one, other in zip(want, got, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()


# Long thinking, so that pages run out.
BUSY = ((TOK.think_end_id, 1.0), *constrained.BIAS[1:])


@pytest.mark.long  # the fast test is of test_speculative.py
def test_engines_with_drafts_draw_the_same(scheduler):
  """Speculation is off for rows with a grammar, and on for the others."""
  cfg = dataclasses.replace(CFG, num_mtp_modules=1)
  m2 = model.M2(cfg)
  variables = jax.jit(m2.init)(jax.random.key(1), jnp.zeros((1, 4), jnp.int32))
  requests = [request(PAIR, 1), request(None, 2, max_tokens=24), request(PAIR, 3)]
  found = []
  engine = Engine(cfg, dataclasses.replace(CONFIG, draft_tokens=1))
  for drafts in (0, 1):
    how = SchedulerConfig(decode_steps=4, draft_tokens=drafts)
    running = Scheduler(engine, variables, 0, how).start(warmup=False)
    try:
      found.append([result.tokens.tolist() for result in run(running, *requests)])
    finally:
      running.stop()
  assert found[0] == found[1]


def test_streaming_and_cancelling(scheduler):
  """Tokens arrive one by one; a cancelled response ends with those it has."""
  pieces = []
  (result,) = run(scheduler, request(PAIR, 2), on_tokens=pieces.append)
  assert [token for piece in pieces for token in piece] == result.tokens.tolist()
  arrived = threading.Event()
  endless = request({'type': 'string'}, 1, logit_bias=BIAS_ENDLESS)
  handle = scheduler.submit(endless, lambda _: arrived.set())
  assert arrived.wait(TIMEOUT_S)
  handle.cancel()
  assert handle.future.result(TIMEOUT_S).finish_reason in ('cancelled', 'length')


BIAS_ENDLESS = ((TOK.encode('"')[0], -50.0),)


class Expensive:
  """A grammar that exceeds a limit with its third token."""

  def start(self):
    return self

  tokens = 0

  def allow(self, mask):
    mask[:] = -1

  def advance(self, tokens):
    self.tokens += len(tokens)
    if self.tokens == 3:
      raise GrammarError('grammar: too long')


def test_an_expensive_grammar_fails_alone(scheduler):
  """A limit at any step is an error of that request; its neighbours go on."""
  want, expensive = request(PAIR, 1), request(None, 1, max_tokens=9, stop_ids=())
  bad = scheduler.submit(dataclasses.replace(expensive, grammar=Expensive()))
  good = scheduler.submit(want)
  with pytest.raises(GrammarError, match='too long'):
    bad.future.result(TIMEOUT_S)
  assert good.future.result(TIMEOUT_S).finish_reason == 'stop'
  assert run(scheduler, want)[0].finish_reason == 'stop'


def test_steps_have_a_budget(monkeypatch):
  """The time of all steps of a response is bounded, not only that of each."""
  monkeypatch.setattr(grammars, '_FREE_STEP_S', -1.0)
  matcher = constrained.grammar(PAIR).start()
  with pytest.raises(GrammarError, match='too long'):
    matcher.advance([TOK.think_end_id])
    allowed(matcher)


HOSTILE = [
  {'type': 'frob'},
  {'$ref': '#/nowhere'},
  {'$ref': 'http://example.com/schema'},
  {'type': 'string', 'pattern': '('},
  {'type': 'string', 'pattern': '(a)(?=b)'},
  {'not': {}},
  {'type': 'object', 'properties': {'a': False}, 'required': ['a']},
  {'allOf': [{'anyOf': [{'properties': {f'{i}{j}': {}}} for i in range(6)]}
             for j in range(8)]},
]  # fmt: skip


@pytest.mark.parametrize('schema', HOSTILE, ids=lambda schema: str(schema)[:40])
def test_what_does_not_compile_says_why(schema):
  with pytest.raises(grammars.InvalidGrammar, match=r'\w{4}'):
    constrained.grammar(schema)


@pytest.mark.parametrize(
  'schema',
  [
    {'type': 'string', 'pattern': '(.{1,200}){1,200}'},
    {'type': 'array', 'items': {'type': 'string'}, 'minItems': 10**5},
    {'enum': list(range(5000))},
  ],
  ids=lambda schema: str(schema)[:40],
)
def test_hostile_schemas_are_bounded(schema):
  """Compilation and 200 steps take seconds at most, or fail with an error."""
  rng, begin = np.random.default_rng(0), time.monotonic()
  try:
    matcher = constrained.grammar(schema).start()
    matcher.advance([TOK.think_end_id])
    for _ in range(200):
      token = int(rng.choice(np.flatnonzero(allowed(matcher))))
      if token == TOK.eos_id:
        break
      matcher.advance([token])
  except (GrammarError, grammars.InvalidGrammar):
    pass
  assert time.monotonic() - begin < 10


def test_calls_instead_of_json():
  """With tools the response may call them; then nothing follows but the end."""
  matcher = constrained.grammar(PAIR, calls=True).start()
  matcher.advance([TOK.think_end_id, *TOK.encode('\n\n\n')])
  assert allowed(matcher)[TOK.tool_call_id]
  matcher.advance([TOK.tool_call_id, *TOK.encode('\nany <invoke> text')])
  matcher.advance([TOK.tool_call_end_id])
  assert np.flatnonzero(allowed(matcher)).tolist() == [TOK.eos_id]


def test_forced_calls_are_calls(scheduler):
  """Whatever a random model writes, a finished response calls one of the tools, and has
  no content."""
  names = ('ls', 'w.c')
  ids = TOK.tool_call_id, TOK.tool_call_end_id
  grammar = constrained.compiler().compile(grammars.tool_call(names, ids))
  bias = (*constrained.BIAS[:2], (TOK.tool_call_end_id, 9.0))
  asked = [
    dataclasses.replace(request(seed=seed, logit_bias=bias), grammar=grammar)
    for seed in range(12)
  ]
  results = run(scheduler, *asked)
  finished = [r.tokens.tolist() for r in results if r.finish_reason == 'stop']
  assert len(finished) > 4
  for tokens in finished:
    message = chat.parse(tokenizer.pieces(TOK, tokens))
    assert message.tool_calls and message.tool_calls[0].name in names, message
    assert not message.content.strip()


def test_engines_without_grammars_refuse_one():
  running = start(dataclasses.replace(CONFIG, grammars=False))
  try:
    with pytest.raises(ValueError, match=r'EngineConfig\.grammars'):
      running.submit(request(PAIR))
  finally:
    running.stop()
