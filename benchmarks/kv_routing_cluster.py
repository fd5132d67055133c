"""A discrete-event simulation of engine replicas behind a router, for agent sessions.

The router's part is the real one: `routing.fleet` with a policy of
`routing.policies`, which learns rates and pages from the replicas' statistics
and journals as it would from engines. A replica is the engine's real Batcher over
calls that cost time (`kv_routing_engine`).

Time passes in ticks of the replicas, as in `serving.scheduler`: what arrives during a
tick is seen by the next, and a tick's tokens are delivered at its end.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.kv_routing_engine import (
  SharedCache,
  SimulatedEngine,
  Times,
  make_batcher,
)
from benchmarks.kv_routing_trace import Session, Turn
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.routing.fleet import Fleet, Prior, Sizes
from m2jax.rollout.routing.policies import Choice, Policy
from m2jax.rollout.serving.batcher import TOTALS
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.tiers.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
  """The replicas.

  Attributes:
    replicas: number.
    engine, scheduler: each replica's configs.
    times: how long each replica's work takes.
    token_bytes: bytes of a token's keys and values; migration_bytes_per_s is what a
      replica sends or receives, 0 if pages cannot be moved.
    swap_s: seconds between changes of weights; 0 for none.
    in_flight: groups of sessions that run at the same time; 0 for all.
  """

  replicas: int
  engine: EngineConfig
  scheduler: SchedulerConfig
  times: Times
  token_bytes: float = 0.0
  migration_bytes_per_s: float = 0.0
  swap_s: float = 0.0
  in_flight: int = 0
  vocabulary: int = 200_064


@dataclasses.dataclass
class Request:
  """A request of the replay and what became of it; times in seconds."""

  session: int
  turn: int
  submitted: float
  replica: int = -1
  predicted_tokens: int = 0  # of the prompt that the router expected to be cached
  first: float = 0.0
  ended: float = 0.0


class SimulatedReplica:
  """An engine's Batcher in simulated time."""

  def __init__(self, number: int, config: ClusterConfig, shared: SharedCache | None):
    self.number = number
    self.engine = SimulatedEngine(config.engine, config.times, config.vocabulary)
    self.batcher = make_batcher(self.engine, config.scheduler, shared)
    self.batcher.journal.read()  # from now on it is kept
    self.busy_s = 0.0
    self.ticking = False
    self.tick_ends = 0.0
    self.link_free = 0.0  # when it can send or receive pages
    self.migrated_tokens, self.migration_s = 0, 0.0
    self.new_version: int | None = None
    self.arrived: list[Job] = []

  def stats(self) -> dict[str, float]:
    """What `routing.fleet` reads of `Scheduler.stats`."""
    return {key: self.batcher.counts[key] for key in TOTALS} | {
      'busy_s': self.busy_s,
      'migrated_tokens': self.migrated_tokens,
      'migration_s': self.migration_s,
    }

  @property
  def cache(self) -> PrefixCache:
    return self.batcher.table.caches[0]

  @property
  def has_work(self) -> bool:
    return bool(self.batcher.busy or self.arrived or self.new_version is not None)

  def tick(self) -> float:
    """One step of the engine's thread; returns its seconds."""
    if self.new_version is not None:
      self.batcher.replace_weights(None, self.new_version)
      self.new_version = None
    self.batcher.waiting.extend(self.arrived)
    self.arrived.clear()
    self.engine.spent_s = 0.0
    self.batcher.tick()
    self.busy_s += self.engine.spent_s
    return self.engine.spent_s


class Cluster:
  """Replays sessions; `requests` has what happened.

  Attributes:
    fleet: the router's state. now: simulated seconds.
  """

  def __init__(
    self,
    config: ClusterConfig,
    traces: Sequence[Session],
    policy: Policy | Callable[[Cluster, Turn], Choice],
    *,
    shared: bool = False,
    global_knowledge: bool = False,
    seed: int = 0,
  ):
    """Nothing runs yet.

    Args:
      policy: one of `routing.policies`; with `global_knowledge` a function of the
        cluster itself and the turn.
      shared: all replicas have one cache without bound.
    """
    self.config, self.traces, self.now = config, traces, 0.0
    cache = None
    if shared:
      pages = sum(len(turn.chain) for s in traces for turn in s.turns) + 1
      page_tokens = config.engine.page_tokens
      cache = SharedCache(pages, page_tokens, config.replicas)
    self.replicas = [SimulatedReplica(i, config, cache) for i in range(config.replicas)]
    size = Sizes(
      config.engine.pages - 1,
      config.engine.page_tokens,
      config.engine.slots,
      config.scheduler.prefill_budget_tokens,
      config.scheduler.decode_steps,
    )
    self._oracle = policy if global_knowledge else None
    prior = Prior()
    if config.migration_bytes_per_s:
      seconds = config.token_bytes / config.migration_bytes_per_s
      prior = dataclasses.replace(prior, migration_s=seconds)
    self.fleet = Fleet([size] * config.replicas, policy, prior=prior, seed=seed)
    self.requests: list[Request] = []
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._count, self._seeds = itertools.count(), itertools.count()
    self._outbox: list[Callable[[], None]] = []
    self._left = [0] * (1 + max(session.group for session in traces))
    for session in traces:
      self._left[session.group] += 1
    self._version = 0

  def run(self) -> Cluster:
    """Runs until all sessions have ended."""
    running = self.config.in_flight or len(self._left)
    self._next_group = min(running, len(self._left))
    for group in range(self._next_group):
      self._start(group)
    if self.config.swap_s:
      self._at(self.config.swap_s, self._swap)
    while any(self._left):
      self.now, _, event = heapq.heappop(self._events)
      event()
    return self

  def _at(self, time: float, event: Callable[[], None]) -> None:
    heapq.heappush(self._events, (time, next(self._count), event))

  def _start(self, group: int) -> None:
    for number, session in enumerate(self.traces):
      if session.group == group:
        submit = functools.partial(self._submit, number, 0)
        self._at(self.now + session.start_s, submit)

  def _swap(self) -> None:
    self._version += 1
    self.fleet.advance(self._version)
    for replica in self.replicas:
      replica.new_version = self._version
      self._wake(replica)
    self._at(self.now + self.config.swap_s, self._swap)

  def _submit(self, session: int, number: int) -> None:
    turn = self.traces[session].turns[number]
    request = Request(session, number, self.now)
    self.requests.append(request)
    chain = turn.chain[: len(turn.prompt) // self.config.engine.page_tokens]
    if self._oracle is not None:
      choice = self._oracle(self, turn)
    else:
      key = session.to_bytes(4, 'big')
      choice = self.fleet.choose(chain, len(turn.prompt), key)
    flight = self.fleet.send(choice, chain, len(turn.prompt))
    request.replica = choice.replica
    request.predicted_tokens = len(turn.prompt) - flight.missing_tokens
    enqueue = functools.partial(self._enqueue, request, turn, flight)
    if choice.source is None:
      enqueue()
      return
    source, target = self.replicas[choice.source], self.replicas[choice.replica]
    version = source.batcher.version
    nodes = source.cache.match(turn.prompt[:-1])
    source.cache.hold(nodes)
    moved = len(nodes) - len(target.cache.match(turn.prompt[:-1]))
    tokens = max(moved, 0) * self.config.engine.page_tokens
    seconds = tokens * self.config.token_bytes / self.config.migration_bytes_per_s
    begin = max(self.now, source.link_free, target.link_free)
    source.link_free = target.link_free = begin + seconds

    def arrive():
      source.cache.release(nodes)
      target.migrated_tokens += tokens
      target.migration_s += self.now - request.submitted
      if version == target.batcher.version == source.batcher.version:
        _adopt(target.cache, turn.prompt, len(nodes), version)
      enqueue()

    self._at(begin + seconds, arrive)

  def _enqueue(self, request: Request, turn: Turn, flight) -> None:
    replica = self.replicas[request.replica]
    seed = next(self._seeds)
    replica.engine.responses[seed] = turn.response
    future = concurrent.futures.Future()
    sampling = SamplingParams(max_tokens=len(turn.response))
    first = functools.partial(self._first_token, request, flight)
    job = Job(
      turn.prompt,
      GenerateRequest(turn.prompt, sampling),
      seed,
      lambda _: self._outbox.append(first),
      future,
    )
    end = functools.partial(self._end, request, turn, flight, seed)
    future.add_done_callback(lambda _: self._outbox.append(end))
    replica.arrived.append(job)
    self._wake(replica)

  def _wake(self, replica: SimulatedReplica) -> None:
    if not replica.ticking:
      replica.ticking = True
      self._at(self.now, functools.partial(self._tick, replica))

  def _tick(self, replica: SimulatedReplica) -> None:
    spent = replica.tick()
    done, self._outbox = self._outbox, []
    replica.tick_ends = self.now + spent
    self._at(self.now + spent, functools.partial(self._tock, replica, done))

  def _tock(self, replica: SimulatedReplica, done: list[Callable[[], None]]) -> None:
    """Ends a tick: delivers its tokens and starts the next one."""
    self.fleet.observe(replica.number, replica.stats(), replica.batcher.journal.read())
    for deliver in done:
      deliver()
    replica.ticking = False
    if replica.has_work:
      self._wake(replica)

  def _first_token(self, request: Request, flight) -> None:
    if not request.first:
      request.first = self.now
      self.fleet.first_token(flight)

  def _end(self, request: Request, turn: Turn, flight, seed: int) -> None:
    request.ended = self.now
    del self.replicas[request.replica].engine.responses[seed]
    stored = len(turn.prompt) + len(turn.response) - 1  # not the last token
    chain = turn.chain[: stored // self.config.engine.page_tokens]
    self.fleet.end(flight, chain, len(turn.response))
    turns = self.traces[request.session].turns
    if request.turn + 1 < len(turns):
      submit = functools.partial(self._submit, request.session, request.turn + 1)
      self._at(self.now + turn.tool_s, submit)
      return
    group = self.traces[request.session].group
    self._left[group] -= 1
    if not self._left[group] and self._next_group < len(self._left):
      self._next_group += 1
      self._start(self._next_group - 1)


def _adopt(cache: PrefixCache, prompt: np.ndarray, pages: int, version: int) -> None:
  """Stores the first pages of a prompt that have come from another replica."""
  size = cache.page_tokens
  nodes = cache.match(prompt[: pages * size])
  cache.hold(nodes)
  own = cache.allocate(pages - len(nodes)) or []
  while own:
    start = len(nodes) * size
    node = cache.insert(nodes, prompt[start : start + size], own[0], version)
    if node is None:
      break
    nodes.append(node)
    own.pop(0)
  cache.free(own)
  cache.release(nodes)


def summary(cluster: Cluster) -> dict[str, float]:
  """What a replay shows.

  hit_rate: share of the prompts' tokens that were cached when their request began.
  ttft_p50_s, ttft_p99_s: time from a request to its first token.
  tokens_per_s: response tokens per second.
  balance: mean over maximum of the replicas' busy time, 1 if all worked the same.
  computed_tokens: tokens computed of prompts, recomputation after retractions included.
  predicted: share of the prompts' tokens that the router expected to be cached.
  """
  counts = [replica.batcher.counts for replica in cluster.replicas]
  total = lambda key: sum(count[key] for count in counts)
  ttft = np.array([r.first - r.submitted for r in cluster.requests])
  wall = max(r.ended for r in cluster.requests)
  busy = np.array([replica.busy_s for replica in cluster.replicas])
  prompts = sum(
    len(cluster.traces[r.session].turns[r.turn].prompt) for r in cluster.requests
  )
  return {
    'hit_rate': total('prefix_hit_tokens') / prompts,
    'ttft_p50_s': float(np.quantile(ttft, 0.5)),
    'ttft_p99_s': float(np.quantile(ttft, 0.99)),
    'tokens_per_s': total('sampled_tokens') / wall,
    'balance': float(busy.mean() / busy.max()),
    'busy': float(busy.mean() / wall),
    'wall_s': wall,
    'computed_tokens': total('prefill_tokens'),
    'migrated_tokens': sum(r.migrated_tokens for r in cluster.replicas),
    'retractions': total('retractions'),
    'predicted': sum(r.predicted_tokens for r in cluster.requests) / prompts,
  }
