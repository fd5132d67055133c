"""Grammars of responses by llguidance (extra `grammars`): an implementation of
`api.Grammar`.

A grammar is text of llguidance's variant of Lark; `json_response` writes that of a
response whose content is JSON of a schema, `tool_call` that of one that calls a tool.
It begins after `</think>`: before that, all tokens are free except the one that ends
the message. That one may be drawn only where the grammar is complete.

Schemas are untrusted. llguidance's limits bound compilation and each step, in its
own units of work; `Matcher` bounds the time of all steps of a response, since steps of
some small schemas (an integer's `multipleOf`) each come close to their limit.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from m2jax.rollout.api import GrammarError
from m2jax.text.tokenizer import Tokenizer

# About 10 ms of compilation, and 7 ms of a step.
_LIMITS = dict(
  initial_lexer_fuel=500_000,
  step_lexer_fuel=100_000,
  step_max_items=20_000,
  max_items_in_row=2_000,
  max_lexer_states=20_000,
  max_grammar_size=50_000,
  verbose_errors=False,
)
_FREE_STEP_S = 0.002  # a step of this time or less costs nothing of the budget
_BUDGET_S = 1.0
_CACHED = 64  # compiled grammars
_ERROR_CHARACTERS = 300
# Of JSON between its tokens, compact or as `json.dumps` writes it: where more is
# allowed, a small model fills every gap.
_WHITE_SPACE = ' ?'


class InvalidGrammar(ValueError):
  """A grammar does not compile, or is too large; says why."""


def json_response(schema: dict[str, Any], tool_call: tuple[int, int] | None) -> str:
  """The grammar of a response of JSON, as M2's template renders a content.

  Args:
    schema: a JSON schema.
    tool_call: the ids before and after calls, if there may be some instead.
  """
  schema = {'x-guidance': {'whitespace_pattern': _WHITE_SPACE}, **schema}
  calls = ''
  if tool_call:
    begin, end = tool_call
    calls = rf' | "\n" <[{begin}]> /(?s:.*)/ <[{end}]>'
  return rf'start: "\n\n" (value{calls})' f'\nvalue: %json {json.dumps(schema)}\n'


def tool_call(names: Sequence[str], tool_call: tuple[int, int]) -> str:
  """The grammar of a response that calls one of some tools, as M2's template writes it.

  Other calls may follow; there is no content.

  Args:
    names: the tools' names.
    tool_call: the ids before and after calls.
  """
  begin, end = tool_call
  some = '|'.join(map(re.escape, names))
  argument = r'<parameter name="[^"\n]+">(?s:.*)<\/parameter>\n'
  call = rf'\n<invoke name="({some})">\n({argument})*<\/invoke>\n(?s:.*)'
  return rf'start: "\n\n\n" <[{begin}]> /{call}/ <[{end}]>'


class Compiler:
  """Compiles grammars for a tokenizer.

  Raises:
    ImportError: llguidance is not installed; says how to install it.
  """

  def __init__(self, tokenizer: Tokenizer):
    try:
      import llguidance
    except ImportError as error:
      raise ImportError(
        "constrained decoding needs llguidance: pip install 'm2jax[grammars]'"
      ) from error
    self._library, self._tokenizer = llguidance, tokenizer
    self._limits = llguidance.LLParserLimits(**_LIMITS)
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
    self._vocabulary = llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size)
    self._cached = functools.lru_cache(_CACHED)(self._matcher)

  def compile(self, text: str) -> Grammar:
    """A grammar; takes up to a few dozen milliseconds, without Python's global lock.

    Raises:
      InvalidGrammar
    """
    return Grammar(self._cached(text), self._tokenizer)

  def _matcher(self, text: str) -> Any:
    matcher = self._library.LLMatcher(
      self._vocabulary, text, limits=self._limits, log_level=0
    )
    if matcher.is_error():
      raise InvalidGrammar(_reason(matcher))
    return matcher


class Grammar:
  """A compiled grammar; see `api.Grammar`."""

  def __init__(self, matcher: Any, tokenizer: Tokenizer):
    self._matcher, self._tokenizer = matcher, tokenizer

  def start(self) -> Matcher:
    return Matcher(self._matcher.deep_copy(), self._tokenizer)


class Matcher:
  """One response; see `api.Matcher`."""

  def __init__(self, matcher: Any, tokenizer: Tokenizer):
    self._matcher = matcher
    self._free = True  # before </think>
    self._begin, self._end = tokenizer.think_end_id, tokenizer.eos_id
    self._words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    self._left_s = _BUDGET_S

  def allow(self, mask: np.ndarray) -> None:
    if self._free:
      mask[:] = -1
      mask[self._end // 32] ^= np.uint32(1 << self._end % 32).view(np.int32)
      return
    begin = time.perf_counter()
    words = self._words
    self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    self._check(begin)
    n = min(len(mask), len(words))
    mask[:n], mask[n:] = words[:n], 0

  def advance(self, tokens: Sequence[int]) -> None:
    begin = time.perf_counter()
    for token in tokens:
      if self._free:
        self._free = token != self._begin
      else:
        self._matcher.consume_token(token)
    self._check(begin)

  def _check(self, begin: float) -> None:
    if self._matcher.is_error():
      raise GrammarError(f'grammar: {_reason(self._matcher)}')
    self._left_s -= max(0.0, time.perf_counter() - begin - _FREE_STEP_S)
    if self._left_s < 0:
      raise GrammarError('grammar: its steps take too long; send a simpler schema')


class _Vocabulary:
  """What llguidance asks of a tokenizer."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self.eos_token_id, self.bos_token_id = tokenizer.eos_id, None
    self.tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
    self.special_token_ids = sorted(tokenizer.special_ids.values())

  def __call__(self, text: bytes) -> list[int]:
    return self._tokenizer.encode(text.decode('utf-8', 'replace'), special=False)


def _reason(matcher: Any) -> str:
  """The first line of an error, which has no text of the grammar."""
  lines = matcher.get_error().strip().splitlines() or ['unknown error']
  return lines[0].partition(': ')[2][:_ERROR_CHARACTERS] or lines[0][:_ERROR_CHARACTERS]
