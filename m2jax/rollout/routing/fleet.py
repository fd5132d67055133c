"""What a router knows of its replicas, and how it learns it. Starts no threads.

The same object serves the router and the simulation in `benchmarks.kv_routing`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from m2jax.rollout.api import PageEvent
from m2jax.rollout.routing import policies, rates
from m2jax.rollout.routing.policies import Choice, Policy, Query, View
from m2jax.rollout.routing.prefix_index import PrefixIndex
from m2jax.rollout.routing.rates import RateEstimator, Rates

_MEMORY = 0.02  # weight of the newest response in the mean length
_MIGRATION_MEMORY = 0.1  # weight of the newest interval in the mean time


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of a replica, as its statistics report them.

  Attributes:
    pages: pages of its cache, with page_tokens tokens each.
    slots: requests at a time.
    budget_tokens: prompt tokens computed between two decode calls.
    steps: tokens of a sequence in a decode call.
  """

  pages: int
  page_tokens: int
  slots: int
  budget_tokens: float = math.inf
  steps: int = 1


@dataclasses.dataclass(frozen=True)
class Prior:
  """What is assumed before the first measurements, equally of all replicas.

  Attributes:
    rates: rates of the right order of magnitude.
    migration_s: see `View`; inf if replicas have no pool of pages in common.
  """

  rates: Rates = Rates(1e-4, 0.0, call_s=0.1, draw_s=1e-4)
  migration_s: float = math.inf


@dataclasses.dataclass(eq=False)
class Flight:
  """A request that was sent to a replica and has not ended.

  Attributes:
    chain: digests of the prompt's full pages.
    missing_tokens: tokens of the prompt that the replica is expected to compute;
      missing_positions are the positions that they attend to.
    streams: whether its first token has been sampled.
  """

  replica: int
  chain: Sequence[bytes]
  prompt_tokens: int
  missing_tokens: int
  missing_positions: float
  version: int
  streams: bool = False


class Replica:
  """What is known of one replica.

  Attributes:
    alive: whether it can take requests.
    index: its pages.
    estimator: estimates its rates.
    migration_s: seconds to take one token's keys and values from another replica.
  """

  def __init__(self, number: int, sizes: Sizes, index: PrefixIndex, prior: Prior):
    """Alive, without requests."""
    self.number, self.sizes, self.index = number, sizes, index
    self.alive = True
    self.estimator = RateEstimator(prior.rates)
    self.migration_s = prior.migration_s
    self._moved: tuple[float, float] | None = None  # the replica's counters
    self._flights: set[Flight] = set()
    self._waiting = self._waiting_tokens = 0
    self._waiting_positions = 0.0
    self._prefilled: float | None = None  # the replica's counter
    self._progress = 0.0  # computed of the waiting tokens

  def view(self, cached_tokens: int, response_tokens: float, others: Rates) -> View:
    """The view for a prompt; `others` are the rates of measured replicas."""
    sizes, estimator = self.sizes, self.estimator
    left = self._waiting_tokens - self._progress
    share = left / self._waiting_tokens if self._waiting_tokens else 0.0
    return View(
      replica=self.number,
      cached_tokens=cached_tokens,
      waiting=self._waiting,
      waiting_tokens=left,
      waiting_positions=self._waiting_positions * share,
      decoding=len(self._flights) - self._waiting,
      slots=sizes.slots,
      budget_tokens=sizes.budget_tokens,
      steps=sizes.steps,
      response_tokens=response_tokens,
      rates=estimator.rates if estimator.measured else others,
      migration_s=self.migration_s,
    )

  def add(self, flight: Flight) -> None:
    self._flights.add(flight)
    self._waiting += 1
    self._waiting_tokens += flight.missing_tokens
    self._waiting_positions += flight.missing_positions

  def first_token(self, flight: Flight) -> None:
    if flight in self._flights and not flight.streams:
      flight.streams = True
      self._waiting -= 1
      self._waiting_tokens -= flight.missing_tokens
      self._waiting_positions -= flight.missing_positions
      self._progress = max(0.0, self._progress - flight.missing_tokens)

  def observe(self, stats: Mapping[str, float]) -> None:
    self.estimator.observe(stats)
    self._observe_migration(stats)
    tokens = stats['prefill_tokens']
    computed = tokens - (tokens if self._prefilled is None else self._prefilled)
    self._prefilled = tokens
    progress = self._progress + max(0.0, computed)
    self._progress = min(progress, self._waiting_tokens)

  def _observe_migration(self, stats: Mapping[str, float]) -> None:
    if 'migrated_tokens' not in stats:
      return
    now = stats['migrated_tokens'], stats['migration_s']
    tokens, seconds = np.subtract(now, self._moved or now)
    self._moved = now
    common = math.isfinite(self.migration_s)  # else it is a pool of its own
    if common and tokens > 0 and seconds >= 0:
      self.migration_s += _MIGRATION_MEMORY * (seconds / tokens - self.migration_s)

  def remove(self, flight: Flight) -> None:
    self.first_token(flight)
    self._flights.discard(flight)


class Fleet:
  """All replicas. Not thread-safe.

  Attributes:
    replicas: all replicas, by number.
    policy: chooses among those that are alive.
    version: version of the policy whose weights new requests get.
  """

  def __init__(
    self,
    sizes: Sequence[Sizes],
    policy: Policy,
    *,
    prior: Prior | None = None,
    version: int = 0,
    keep_stale: bool = False,
    seed: int = 0,
  ):
    if len({size.page_tokens for size in sizes}) != 1:
      raise ValueError('sizes: all replicas must have pages of the same page_tokens')
    self.page_tokens = sizes[0].page_tokens
    self.policy = policy
    self.version = version
    self._prior, self._keep_stale = prior or Prior(), keep_stale
    self._random = np.random.default_rng(seed)
    self._response_tokens: float | None = None
    self._rates = self._prior.rates  # of a replica that has not worked yet
    self.replicas = [self._new(number, size) for number, size in enumerate(sizes)]

  def _new(self, number: int, sizes: Sizes) -> Replica:
    stale = self._keep_stale
    index = PrefixIndex(sizes.pages, self.version, keep_stale=stale)
    return Replica(number, sizes, index, self._prior)

  def choose(
    self,
    chain: Sequence[bytes],
    prompt_tokens: int,
    session: bytes = b'',
    failed: Collection[int] = (),
  ) -> Choice | None:
    """Where a request goes; None if no replica is alive.

    Args:
      failed: replicas that it goes to only if no other one is alive.
    """
    mean = self._response_tokens or 1.0
    living = [replica for replica in self.replicas if replica.alive]
    views = [
      replica.view(self._cached(replica, chain, prompt_tokens), mean, self._rates)
      for replica in [r for r in living if r.number not in failed] or living
    ]
    if not views:
      return None
    query = Query(prompt_tokens, session, float(self._random.random()))
    return self.policy(query, views)

  def send(self, choice: Choice, chain: Sequence[bytes], prompt_tokens: int) -> Flight:
    """Counts a request as sent; its pages are expected at the replica from now on."""
    replica = self.replicas[choice.replica]
    cached = self._cached(replica, chain, prompt_tokens)
    if choice.source is not None:
      source = self.replicas[choice.source]
      cached = max(cached, self._cached(source, chain, prompt_tokens))
    flight = Flight(
      choice.replica,
      chain,
      prompt_tokens,
      prompt_tokens - cached,
      policies.positions(cached, prompt_tokens),
      self.version,
    )
    replica.index.use(chain, self.version)
    replica.add(flight)
    return flight

  def first_token(self, flight: Flight) -> None:
    """The request streams: its prompt has been computed."""
    self.replicas[flight.replica].first_token(flight)

  def end(
    self, flight: Flight, chain: Sequence[bytes], response_tokens: int | None
  ) -> None:
    """The request has ended.

    Args:
      chain: digests of its prompt and response, which are cached now.
      response_tokens: None if it failed.
    """
    replica = self.replicas[flight.replica]
    replica.remove(flight)
    if response_tokens is None:
      return
    replica.index.use(chain, flight.version)
    mean = self._response_tokens
    if mean is None:
      self._response_tokens = float(response_tokens)
    else:
      self._response_tokens = mean + _MEMORY * (response_tokens - mean)

  def observe(
    self, number: int, stats: Mapping[str, float], events: Sequence[PageEvent] = ()
  ) -> None:
    """Takes a replica's statistics and what is new in its journal."""
    replica = self.replicas[number]
    replica.observe(stats)
    replica.index.apply(events)
    found = [r.estimator.rates for r in self.replicas if r.estimator.measured]
    self._rates = rates.mean(found) if found else self._prior.rates

  def advance(self, version: int) -> None:
    """All replicas get new weights."""
    self.version = version
    for replica in self.replicas:
      replica.index.advance(version)

  def lose(self, number: int) -> None:
    """Forgets a lost replica and its pages."""
    self.replicas[number].alive = False
    self.replicas[number].index.clear()

  def replace(self, number: int, sizes: Sizes) -> None:
    """A new replica, without pages, serves under this number."""
    self.replicas[number] = self._new(number, sizes)

  def _cached(
    self, replica: Replica, chain: Sequence[bytes], prompt_tokens: int
  ) -> int:
    # The last token of a prompt is always computed.
    tokens = replica.index.match(chain) * self.page_tokens
    return min(tokens, (prompt_tokens - 1) // self.page_tokens * self.page_tokens)
