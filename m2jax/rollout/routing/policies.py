"""Which replica serves a request: pure functions of what a router knows.

The cost-aware policy is Forge's (facts/m2-and-forge.md §4.7), whose formula is not
published. Ours is argmin over replicas j of the expected time to the first token,

  wait_j + min(recompute the missing prefix, migrate it from another replica),

with all times from measured rates. No session is pinned: a conversation follows its
pages as long as that is cheaper than to compute them again elsewhere.

The others are what it is compared with: prefix-aware is the rule of vllm-router's and
SGLang's `cache_aware`, sticky is consistent hashing of the session
(facts/rl-systems.md §4.5).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence

from m2jax.rollout.routing.rates import Rates


@dataclasses.dataclass(frozen=True)
class Query:
  """A request.

  Attributes:
    prompt_tokens: tokens of its prompt.
    session: identifies its conversation.
    draw: a random number in [0, 1), the policy's only source of randomness.
  """

  prompt_tokens: int
  session: bytes = b''
  draw: float = 0.0


@dataclasses.dataclass(frozen=True)
class View:
  """What is known of a replica that can take requests.

  Attributes:
    replica: its number.
    cached_tokens: tokens of the prompt's prefix that it has, or will have, in its
      cache.
    waiting: requests sent to it without a first token yet; waiting_tokens are the
      prompt tokens that it still has to compute for them, which attend to
      waiting_positions.
    decoding: requests that are sampling tokens.
    slots: requests that it serves at the same time.
    budget_tokens: prompt tokens that it computes between two decode calls.
    steps: tokens of a sequence in a decode call.
    response_tokens: expected response length of a request.
    rates: its measured rates.
    migration_s: seconds to take one token's keys and values from another replica; inf
      if it cannot.
  """

  replica: int
  cached_tokens: int
  waiting: int
  waiting_tokens: float
  waiting_positions: float
  decoding: int
  slots: int
  budget_tokens: float
  steps: int
  response_tokens: float
  rates: Rates
  migration_s: float = math.inf

  @property
  def load(self) -> int:
    """Requests in flight."""
    return self.waiting + self.decoding


@dataclasses.dataclass(frozen=True)
class Choice:
  """Where a request goes.

  Attributes:
    replica: the replica that serves it.
    source: the replica from which it first takes pages of the prefix, or None.
  """

  replica: int
  source: int | None = None


Policy = Callable[[Query, Sequence[View]], Choice]


def random(query: Query, views: Sequence[View]) -> Choice:
  """Any replica."""
  return Choice(views[int(query.draw * len(views))].replica)


def least_loaded(query: Query, views: Sequence[View]) -> Choice:
  """The replica with fewest requests in flight."""
  least = min(view.load for view in views)
  return random(query, [view for view in views if view.load == least])


def sticky(query: Query, views: Sequence[View]) -> Choice:
  """Rendezvous hashing of the session: it moves only if its replica is gone."""

  def weight(view: View) -> bytes:
    key = query.session + view.replica.to_bytes(4, 'big')
    return hashlib.blake2b(key, digest_size=8).digest()

  return Choice(max(views, key=weight).replica)


@dataclasses.dataclass(frozen=True)
class PrefixAware:
  """The longest cached prefix, unless the load is out of balance.

  Attributes:
    least_share: share of the prompt that must be cached; else the least loaded replica
      is chosen.
    absolute, relative: the load is out of balance when its maximum is above the minimum
      by more than `absolute` requests and by more than the factor `relative`. The
      defaults had the higher hit rate of the two that are published.
  """

  least_share: float = 0.5
  absolute: int = 32
  relative: float = 1.5

  def __call__(self, query: Query, views: Sequence[View]) -> Choice:
    loads = [view.load for view in views]
    most, least = max(loads), min(loads)
    if most - least > self.absolute and most > self.relative * least:
      return least_loaded(query, views)
    longest = max(view.cached_tokens for view in views)
    if longest <= self.least_share * query.prompt_tokens:
      return least_loaded(query, views)
    return least_loaded(query, [v for v in views if v.cached_tokens == longest])


def cost_aware(query: Query, views: Sequence[View]) -> Choice:
  """The least expected time to the first token."""
  source = max(views, key=lambda view: view.cached_tokens)
  options = [cost_s(query, view, source) for view in views]
  least = min(cost for cost, _ in options) * (1 + 1e-9)
  best = [choice for cost, choice in options if cost <= least]
  return best[int(query.draw * len(best))]


def cost_s(query: Query, view: View, source: View) -> tuple[float, Choice]:
  """Time to the first token at a replica, which may take pages from `source` first."""
  end = query.prompt_tokens
  recompute = _compute_s(view, view.cached_tokens, end, 0.0)
  moved = source.cached_tokens - view.cached_tokens
  if moved > 0 and math.isfinite(view.migration_s):
    arrives = moved * view.migration_s
    migrate = _compute_s(view, source.cached_tokens, end, arrives)
    if migrate < recompute:
      return migrate, Choice(view.replica, source.replica)
  return recompute, Choice(view.replica)


def _compute_s(view: View, start: int, end: int, arrives_s: float) -> float:
  """Time to compute the tokens from start to end, once those before have arrived."""
  wait = max(arrives_s, wait_s(view))  # pages travel while the request would wait
  return wait + prefill_s(view, end - start, positions(start, end)) + decode_s(view)


def positions(start: int, end: int) -> float:
  """Positions that the tokens from start to end attend to, all together."""
  return (end - start) * (start + end + 1) / 2


def decode_s(view: View) -> float:
  """Time of the decode call that gives the request its first token."""
  return view.rates.decode_s(max(view.decoding, 1), view.steps)


def prefill_s(view: View, tokens: float, attended: float) -> float:
  """Time of prompt tokens, with the decode calls between two chunks of them."""
  calls = tokens / view.budget_tokens if view.decoding else 0.0
  rates = view.rates
  return tokens * rates.prefill_s + attended * rates.position_s + calls * decode_s(view)


def wait_s(view: View) -> float:
  """Time until the replica begins with a request that is sent to it now."""
  running = decode_s(view) / 2 if view.load else 0.0  # the rest of the present call
  wait = running + prefill_s(view, view.waiting_tokens, view.waiting_positions)
  above = view.load + 1 - view.slots
  if above > 0:  # this many responses have to end before
    call = decode_s(view)
    ends_s = view.response_tokens / view.steps * call / view.slots
    wait = max(wait, above * ends_s)
  return wait


POLICIES: dict[str, Policy] = {
  'random': random,
  'least_loaded': least_loaded,
  'sticky': sticky,
  'prefix_aware': PrefixAware(),
  'cost_aware': cost_aware,
}
