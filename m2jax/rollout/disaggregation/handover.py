"""What a decode engine requests from a prefill engine, and what it gets.

The decode engine asks for the pages of a sequence from the first one that it lacks. The
prefill engine computes what it lacks itself, and hands the pages over in order while it
computes the next ones (DESIGN §7; facts/m2-and-forge.md §4.7: prefill and decode as
independent instances).

Every part names the oldest and the newest policy version of the weights that computed
it, so that the decode engine never caches it as of other weights.

Axes: n pages of a part, in the layout of `pages.Pages`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.pages import DEPTH_DTYPE, EXPERT_DTYPE, Pages, axes

PART_PAGES = 16  # pages of a part at most, by default


class HandoverError(RuntimeError):
  """The prefill engine will not hand over the pages of a sequence."""


class NewerWeights(HandoverError):
  """The prefill engine already computes with weights that the decode engine lacks."""


@dataclasses.dataclass(frozen=True)
class HandoverConfig:
  """When pages are handed over, and how.

  Attributes:
    local_tokens: the decode engine prefills up to this many missing tokens itself;
      None: the number that pays by times measured at the start (`break_even`).
    part_pages: pages of a part at most; both engines move that many in one call.
    timeout_s: time without any pages after which an ask is given up, and the decode
      engine prefills it.
  """

  local_tokens: int | None = None
  part_pages: int = PART_PAGES
  timeout_s: float = 30.0

  def __post_init__(self):
    least = self.local_tokens is None or self.local_tokens >= 0
    require(self, least, 'local_tokens', 'at least 0, or None')
    require(self, self.part_pages >= 1, 'part_pages', 'at least 1')
    require(self, self.timeout_s > 0, 'timeout_s', 'positive')


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
  """A sequence whose pages a decode engine wants.

  Attributes:
    tokens: [n] int32; keys and values of all but the last are wanted.
    first_page: the first one that it lacks.
    version: the policy's version; older weights must not compute any of it.
  """

  tokens: np.ndarray
  first_page: int
  version: int


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """Some pages of an ask, in order.

  Attributes:
    first_page: index of the first in the sequence.
    held: tokens of the sequence whose keys and values are in these pages and those
      before.
    versions: the oldest and the newest policy version that computed any of them.
    pages: host arrays.
  """

  first_page: int
  held: int
  versions: tuple[int, int]
  pages: Pages

  @property
  def num_pages(self) -> int:
    return len(self.pages.tokens)

  @property
  def nbytes(self) -> int:
    return sum(x.nbytes for x in self.pages if x is not None)


# Called with the parts of an ask in order, or with the reason why no more will come;
# from any thread, and must return quickly.
Receive = Callable[[Part | HandoverError], None]


class Prefills(Protocol):
  """A prefill engine, in this process or in another."""

  @property
  def layout(self) -> dict[str, Any] | None:
    """See `layout`; None if each connection checks it."""

  @property
  def available(self) -> bool:
    """Whether it would make sense to ask now."""

  def start(self, *, warmup: bool = True) -> Any: ...

  def ask(self, ask: Ask, receive: Receive) -> Callable[[], None]:
    """Asks for pages; the function that is returned cancels it. Never blocks.

    Raises:
      HandoverError: it has stopped.
    """

  def give_up(self, reason: str) -> None:
    """Called when it has given no pages for too long; its asks have been cancelled."""

  def update_weights(self, variables: Any, version: int) -> None: ...

  def stats(self) -> dict[str, float]: ...

  def stop(self) -> None: ...


def layout(cfg: ModelConfig, config: EngineConfig, part_pages: int) -> dict[str, Any]:
  """What two engines must agree on to hand over pages; JSON-able."""
  return dict(
    context_tokens=config.context_tokens,
    part_pages=part_pages,
    byteorder=sys.byteorder,
    num_layers=cfg.num_layers,
    num_kv_heads=cfg.num_kv_heads,
    head_dim=cfg.head_dim,
    vocab_size=cfg.vocab_size,
    num_experts=cfg.num_experts,
    experts_per_token=cfg.experts_per_token,
    page_tokens=config.page_tokens,
    cache_dtype=jnp.dtype(config.cache_dtype or cfg.dtype).name,
    record_experts=config.record_experts,
    draft_tokens=config.draft_tokens,
    embed_dim=cfg.embed_dim,
    dtype=jnp.dtype(cfg.dtype).name,
  )


def check_moves_pages(engine: Any) -> None:
  """Raises ValueError for an engine of several processes: none has whole pages."""
  if not engine.moves_pages:
    raise ValueError('engine: one of several processes cannot hand over pages')


def check_layouts(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
  """Raises ValueError if the layouts of two engines do not fit; names the field.

  The prefill engine's context may be longer, and its parts may be smaller.
  """
  for field, want in decode.items():
    value, need = prefill.get(field), 'equal to'
    fits = type(value) is type(want) and value == want
    if field == 'context_tokens':
      fits, need = isinstance(value, int) and value >= want, 'at least'
    elif field == 'part_pages':
      fits, need = isinstance(value, int) and 0 < value <= want, 'at most'
    if not fits:
      raise ValueError(
        f"{field}={value!r} of the prefill engine: must be {need} the decode engine's "
        f'{want!r}'
      )


def shapes(layout: dict[str, Any], pages: int) -> Pages:
  """(shape, dtype) of the arrays of `pages` pages."""
  L, page, modules = layout['num_layers'], layout['page_tokens'], layout['draft_tokens']
  kv = (L + modules, layout['num_kv_heads'], pages, page, layout['head_dim'])
  ids = (L, pages, page, layout['experts_per_token'])
  states = (modules, pages, layout['embed_dim'])
  dtype = jnp.dtype(layout['cache_dtype'])
  return Pages(
    k=(kv, dtype),
    v=(kv, dtype),
    tokens=((pages, page), np.dtype(np.int32)),
    experts=(ids, np.dtype(EXPERT_DTYPE)) if layout['record_experts'] else None,
    states=(states, jnp.dtype(layout['dtype'])) if modules else None,
    depth=((pages, page), np.dtype(DEPTH_DTYPE)) if modules else None,
  )


def pad(pages: Pages, count: int) -> Pages:
  """Pages with `count` in place of their number, zeros at the end."""

  def one(x, axis):
    if x is None or x.shape[axis] == count:
      return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count - x.shape[axis])
    return np.pad(x, widths)

  return Pages(*map(one, pages, axes(pages)))


def first(pages: Pages, count: int) -> Pages:
  """The first `count` pages."""
  take = lambda axis, x: x[(slice(None),) * axis + (slice(count),)]
  return jax.tree.map(take, axes(pages), pages)


def finite(pages: Pages) -> bool:
  """Whether all keys, values and states are finite."""
  numbers = [x for x in (pages.k, pages.v, pages.states) if x is not None]
  return all(bool(np.isfinite(x).all()) for x in numbers)
