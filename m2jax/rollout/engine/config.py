"""The engine's sizes: slots, pages and the shape buckets that bound compilation.

Sizes are for the whole engine. On a mesh each group of devices that shares rows
(`placement`) has its part of them, `EngineConfig.of_group`.
"""

from __future__ import annotations

import dataclasses
import functools

from m2jax.checks import require

_CACHE_DTYPES = (None, 'float32', 'bfloat16', 'float64', 'float8_e4m3fn')


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Sizes of an engine. Empty buckets and 0 pages are derived; tuples are sorted.

  Attributes:
    slots: S, sequences that are being prefilled or decoded.
    context_tokens: prompt and response together, per sequence.
    page_tokens: tokens of a page; whole pages are shared by equal prefixes.
    pages: pages of the cache, for running sequences and prefixes of finished ones. 0:
      room for every slot at its full context.
    max_steps: N, maximum decode steps per call; the host wakes once per call.
    decode_rows: batch sizes of a decode call; the largest is `slots`.
    prefill_shapes: (rows, chunk tokens) of a prefill call.
    contexts: positions read by a call; the last must be context_tokens.
    max_stop_ids: M, maximum stop ids per request.
    max_logit_bias: b, maximum tokens of a request's logit_bias.
    max_top_logprobs: maximum of a request's top_logprobs.
    confident_probability, confident_tokens: a generation ends ('length') after
      confident_tokens consecutive tokens above this probability (DESIGN §6).
    cache_dtype: dtype of the K/V cache; None is the model's activation dtype. In
      'float8_e4m3fn' numbers have no scale and saturate at 448; attention computes in
      the activations' dtype (docs/low_precision.md).
    weights_dtype: 'block_fp8' stores linear layers as the release does; weights that
      are not so already are quantised when they are loaded. A call dequantises a layer
      at a time, to the activations' dtype. None: as they are.
    record_experts: store the expert ids of every token with its K/V and return them
      with the result, for routing replay in training: 2·L·top_k bytes per token.
    grammars: compile calls for requests with a grammar, too: doubles the decode calls.
    draft_tokens: maximum tokens that MTP modules draft for the main model to verify in
      one step; 0 is off. Their keys and values are in the pages, too.
  """

  slots: int = 64
  context_tokens: int = 384
  page_tokens: int = 16
  pages: int = 0
  max_steps: int = 8
  decode_rows: tuple[int, ...] = ()
  prefill_shapes: tuple[tuple[int, int], ...] = ()
  contexts: tuple[int, ...] = ()
  max_stop_ids: int = 8
  max_logit_bias: int = 16
  max_top_logprobs: int = 0
  confident_probability: float = 0.99
  confident_tokens: int = 3000
  cache_dtype: str | None = None
  weights_dtype: str | None = None
  record_experts: bool = False
  grammars: bool = False
  draft_tokens: int = 0

  def __post_init__(self):
    check = functools.partial(require, self)
    for field in ('slots', 'page_tokens', 'max_steps', 'max_stop_ids'):
      check(getattr(self, field) > 0, field, 'positive')
    for field in ('max_logit_bias', 'max_top_logprobs', 'draft_tokens'):
      check(getattr(self, field) >= 0, field, 'at least 0')
    check(self.cache_dtype in _CACHE_DTYPES, 'cache_dtype', f'one of {_CACHE_DTYPES}')
    check(self.weights_dtype in (None, 'block_fp8'), 'weights_dtype', "'block_fp8'")
    check(self.confident_tokens > 0, 'confident_tokens', 'positive')
    check(self.context_tokens > 1, 'context_tokens', 'at least 2')
    check(0 < self.confident_probability < 1, 'confident_probability', 'in (0, 1)')
    derived = {
      'decode_rows': _decode_rows(self.slots),
      'prefill_shapes': _prefill_shapes(self.slots, self.context_tokens),
      'contexts': _contexts(self.context_tokens),
    }
    for field, value in derived.items():
      object.__setattr__(self, field, tuple(sorted(getattr(self, field) or value)))
    if not self.pages:
      object.__setattr__(self, 'pages', 1 + self.slots * self.context_pages)
    least = 1 + self.context_pages
    check(
      self.pages >= least,
      'pages',
      f'at least {least}: one sequence of context_tokens={self.context_tokens} in '
      f'pages of page_tokens={self.page_tokens}, and one page for padding',
    )
    check(
      self.decode_rows[0] > 0 and self.decode_rows[-1] == self.slots,
      'decode_rows',
      f'positive, the largest slots={self.slots}',
    )
    check(
      self.contexts[0] > 0 and self.contexts[-1] == self.context_tokens,
      'contexts',
      f'positive, the largest context_tokens={self.context_tokens}',
    )
    check(
      all(
        0 < rows <= self.slots and 0 < chunk <= self.context_tokens
        for rows, chunk in self.prefill_shapes
      ),
      'prefill_shapes',
      f'(rows, chunk) pairs with rows in [1, slots={self.slots}] and chunks in '
      f'[1, context_tokens={self.context_tokens}]',
    )

  def of_group(self, groups: int) -> EngineConfig:
    """What each of `groups` groups has: its part of slots, pages and rows."""
    part = lambda n: -(-n // groups)
    return dataclasses.replace(
      self,
      slots=part(self.slots),
      pages=1 + max(part(self.pages - 1), self.context_pages),
      decode_rows=tuple({part(rows) for rows in self.decode_rows}),
      prefill_shapes=tuple({(part(rows), c) for rows, c in self.prefill_shapes}),
    )

  @property
  def context_pages(self) -> int:
    """Pages of a sequence of context_tokens."""
    return self.pages_of(self.context_tokens)

  def pages_of(self, tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // self.page_tokens)

  @functools.cached_property
  def table_sizes(self) -> tuple[int, ...]:
    """n of the compiled page tables, ascending."""
    return tuple(sorted({self.pages_of(context) for context in self.contexts}))


# Few shapes, because each is compiled once per context. These fit turns that add a few
# dozen tokens to cached sequences, many prompts at once, and a long one.
_PREFILL_SHAPES = ((1, 32), (16, 32), (8, 64), (32, 64), (1, 256))


def _decode_rows(slots: int) -> tuple[int, ...]:
  return tuple({max(1, slots // 8), max(1, slots // 4), slots})


def _prefill_shapes(slots: int, context_tokens: int) -> tuple[tuple[int, int], ...]:
  return tuple({(min(r, slots), min(c, context_tokens)) for r, c in _PREFILL_SHAPES})


def _contexts(context_tokens: int) -> tuple[int, ...]:
  powers = [128]
  while powers[-1] < context_tokens:
    powers.append(powers[-1] * 2)
  return tuple({min(p, context_tokens) for p in powers})
