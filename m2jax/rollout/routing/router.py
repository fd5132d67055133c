"""Several engine replicas behind one `Serving`.

Each request goes to the replica that the policy chooses (`policies`), from what the
router has learned of all of them (`fleet`). Nothing is pinned.

- A replica that stops serving loses its requests. Those with no streamed tokens are
  submitted to another one, with the same seed, so that they use the same random stream;
  the others fail with EngineError, as on a single engine.
- With `make` the router replaces a stopped replica; without, it waits until that is
  alive again. The replica gets the weights published last before it serves.
- Weights are published to all replicas or, with `follows`, replicas read them from a
  directory, each at its own time. Every token has the version that sampled it (DESIGN
  law 4).

Replicas may be in other processes (`forge.remote.engine_client`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from m2jax.rollout.api import (
  EngineError,
  GenerateRequest,
  Handle,
  NewTokens,
  PageEvent,
  Serving,
)
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.routing import replica_stats
from m2jax.rollout.routing.config import RouterConfig
from m2jax.rollout.routing.fleet import Fleet, Flight, Prior
from m2jax.rollout.routing.policies import POLICIES, Policy
from m2jax.rollout.routing.restarts import Restarts
from m2jax.rollout.serving.batcher import TOTALS
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.rollout.tiers import page_chain


@dataclasses.dataclass(eq=False)
class _Call:
  """A request of the router; `lock` guards what its replica and its caller change."""

  request: GenerateRequest
  chain: list[bytes]
  on_tokens: Callable[[NewTokens], None] | None
  future: concurrent.futures.Future
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
  attempts: int = 0
  failed: set[int] = dataclasses.field(default_factory=set)  # replicas
  streamed: bool = False
  cancelled: bool = False
  handle: Handle | None = None

  def cancel(self) -> None:
    with self.lock:
      self.cancelled, handle = True, self.handle
    if handle is not None:
      handle.cancel()


class Router(Serving):
  """Serves requests on several replicas."""

  def __init__(
    self,
    replicas: Sequence[Serving],
    version: int = 0,
    config: RouterConfig | None = None,
    *,
    make: Callable[[int, Any, int], Serving] | None = None,
    variables: Any = None,
    follows: bool = False,
    page_tokens: int | None = None,
  ):
    """Takes over replicas; those that do not serve yet are used when they do.

    Args:
      replicas: all with the same model and the weights of `version`.
      make: called as make(number, variables, version) in a thread of its own; returns a
        serving replica that replaces a stopped one. None: a replica returns only if it
        is alive again.
      variables: the weights of `version`, which only `make` needs.
      follows: replicas take new weights by themselves; `update_weights` is not called.
      page_tokens: tokens per page of the replicas; None needs one that serves.
    """
    if not replicas:
      raise ValueError('replicas: at least one is needed')
    self.config = config = config or RouterConfig()
    self._replicas = list(replicas)
    self._context_tokens = min(replica.context_tokens for replica in replicas)
    self._fleet = Fleet(
      replica_stats.all_sizes(replicas, page_tokens),
      POLICIES[config.policy],
      prior=Prior(migration_s=config.migration_s),
      version=version,
      keep_stale=config.reuse_stale_prefix,
      seed=config.seed,
    )
    self._make, self._follows = make, follows
    self._restarts = Restarts(
      self._restart if make is not None else None, config.max_restarts, config.restart_s
    )
    self._random = np.random.default_rng(config.seed)
    # _lock guards the fleet, the replicas and the counters, and is never held during a
    # call to a replica. _publishing is held during one to its weights.
    self._lock = threading.Lock()
    self._publishing = threading.Lock()
    self._weights = (variables, version)
    self._stop = threading.Event()
    self._counts = {'resubmissions': 0, 'lost_replicas': 0, 'predicted_hit_tokens': 0}
    self._past = dict.fromkeys(TOTALS, 0)  # totals of replicas that are gone
    self._latest = [dict.fromkeys(TOTALS, 0) for _ in replicas]
    for number, replica in enumerate(replicas):
      replica.page_events()  # from now on its journal is kept
      if not replica.alive:
        self._fleet.lose(number)
        self._restarts.reasons[number] = replica.stopped_reason or 'it was stopped'
    self._observer = threading.Thread(target=self._run, name='router', daemon=True)

  @classmethod
  def over(
    cls,
    engines: Sequence[Engine],
    variables: Any,
    version: int = 0,
    scheduler: SchedulerConfig | None = None,
    config: RouterConfig | None = None,
    *,
    warmup: bool = True,
  ) -> Router:
    """Over engines of this process, each with a scheduler of its own; not started.

    A scheduler that gives up is replaced by a new one.

    Args:
      engines: engines with the same model and sizes, each on its own devices; or one
        engine several times: its schedulers share its compiled programs and its
        device's time.
      variables: the weights of `version`, which the router keeps for new schedulers.
        The caller must not donate them.
      warmup: compiles all shapes before anything is served.
    """

    def make(number: int, variables: Any, version: int) -> Scheduler:
      serving = Scheduler(engines[number], variables, version, scheduler)
      return serving.start(warmup=warmup)

    replicas = [make(number, variables, version) for number in range(len(engines))]
    return cls(replicas, version, config, make=make, variables=variables)

  def start(self) -> Router:
    """Starts to observe the replicas."""
    self._observer.start()
    return self

  def stop(self) -> None:
    """Stops the replicas, too."""
    self._stop.set()
    if self._observer.ident is not None:
      self._observer.join()
    self._restarts.stop()
    for replica in self._replicas:
      replica.stop()

  @property
  def policy(self) -> Policy:
    return self._fleet.policy

  @property
  def _version(self) -> int:
    """Version of the weights published last."""
    return self._weights[1]

  @property
  def context_tokens(self) -> int:
    return self._context_tokens

  @property
  def alive(self) -> bool:
    """Whether requests are being served, or will be when a replica has restarted."""
    with self._lock:
      living = any(replica.alive for replica in self._fleet.replicas)
    return not self._stop.is_set() and (living or self._restarts.pending)

  @property
  def stopped_reason(self) -> str | None:
    if self.alive:
      return None
    if self._stop.is_set():
      return 'it was stopped'
    reasons = sorted(self._restarts.reasons.items())
    return '; '.join(f'replica {number}: {reason}' for number, reason in reasons)

  def submit(
    self,
    request: GenerateRequest,
    on_tokens: Callable[[NewTokens], None] | None = None,
  ) -> Handle:
    chain = self._chain(request.prompt_ids)
    if request.sampling.seed is None:
      with self._lock:
        seed = int(self._random.integers(2**63))
      sampling = dataclasses.replace(request.sampling, seed=seed)
      request = dataclasses.replace(request, sampling=sampling)
    call = _Call(request, chain, on_tokens, concurrent.futures.Future())
    call.future.set_running_or_notify_cancel()
    self._send(call)
    return Handle(call.future, call.cancel)

  def update_weights(self, variables: Any, version: int) -> None:
    with self._publishing:
      latest = self._version
      if version <= latest:
        raise ValueError(
          f'version={version}: must be above {latest}, which the replicas already have'
        )
      with self._lock:
        living = [(r.number, self._replicas[r.number]) for r in self._living()]
      for number, replica in living:
        try:
          replica.update_weights(variables, version)
        except ValueError:  # of the weights: the first replica refuses them
          raise
        except Exception as error:  # it would serve old weights from now on
          logging.exception('replica %d did not take new weights', number)
          self._lose(number, replica, f'it did not take new weights: {error!r}')
      self._weights = (variables if self._make else None, version)
      with self._lock:
        self._fleet.advance(version)

  def stats(self) -> dict[str, float]:
    """The sums of the replicas' statistics, totals of former ones included.

    Also replicas, living_replicas, lost_replicas, resubmissions, and
    predicted_hit_tokens, the prompts' tokens that were expected to be cached when they
    were sent. policy_version is the least.
    """
    with self._lock:
      living = [self._replicas[r.number] for r in self._living()]
      past = self._past | self._counts | {'replicas': len(self._replicas)}
      version = self._version
    return replica_stats.total([replica.stats() for replica in living], past, version)

  def page_events(self) -> Sequence[PageEvent]:
    """None: each replica has pages of its own."""
    return ()

  def observe(self) -> None:
    """Learns from the replicas' statistics and journals; the router's thread does."""
    with self._lock:
      known = [
        (r.number, r.alive, self._replicas[r.number]) for r in self._fleet.replicas
      ]
    for number, alive, replica in known:
      try:
        if alive:
          self._observe(number, replica)
        elif replica.alive and not self._restarts.pending:  # such as a lost connection
          if not self._follows or replica.stats()['policy_version'] >= self._version:
            self._adopt(number, replica)
      except Exception as error:
        logging.warning('replica %d cannot be observed: %r', number, error)

  def _observe(self, number: int, replica: Serving) -> None:
    if not replica.alive:
      self._lose(number, replica, replica.stopped_reason or 'it was stopped')
      return
    stats, events = replica.stats(), replica.page_events()
    with self._lock:
      if self._replicas[number] is replica:
        self._latest[number] = {key: stats.get(key, 0) for key in TOTALS}
        if self._follows and stats['policy_version'] > self._version:
          self._weights = (None, stats['policy_version'])
          self._fleet.advance(stats['policy_version'])
        self._fleet.observe(number, stats, events)

  # --- A request on its way.

  def _chain(self, prompt_ids) -> list[bytes]:
    """Digests of a prompt's pages; none of one that no replica will take."""
    tokens = np.asarray(prompt_ids)
    fits = tokens.ndim == 1 and tokens.size < self._context_tokens
    if not fits or tokens.dtype.kind not in 'iu':
      return []
    return page_chain.chain(tokens, self._fleet.page_tokens)

  def _send(self, call: _Call) -> None:
    """Submits a request to a replica, or to another one if that has stopped.

    Raises:
      EngineError: no replica is serving. Other errors are the replica's.
    """
    size = np.size(call.request.prompt_ids)
    session = call.chain[0] if call.chain else b''
    while True:
      with self._lock:
        choice = self._fleet.choose(call.chain, size, session, call.failed)
        if choice is None or self._stop.is_set():
          raise EngineError('the rollout engine is not running: no replica is serving')
        replica = self._replicas[choice.replica]
        flight = self._fleet.send(choice, call.chain, size)
        self._counts['predicted_hit_tokens'] += size - flight.missing_tokens
      try:
        handle = replica.submit(call.request, self._listener(call, flight))
      except EngineError as error:
        self._end(flight)
        self._lose(choice.replica, replica, str(error))
        continue
      except BaseException:
        self._end(flight)
        raise
      break
    call.attempts += 1
    with call.lock:
      call.handle, cancelled = handle, call.cancelled
    if cancelled:
      handle.cancel()
    handle.future.add_done_callback(
      lambda future: self._done(call, flight, replica, future)
    )

  def _listener(self, call: _Call, flight: Flight):
    """on_tokens of the replica."""

    def on_tokens(tokens: NewTokens) -> None:
      if not flight.streams:
        with self._lock:
          self._fleet.first_token(flight)
      if call.on_tokens is not None:
        call.streamed = True
        call.on_tokens(tokens)

    return on_tokens

  def _done(self, call: _Call, flight: Flight, replica: Serving, future) -> None:
    """The replica has answered, or failed."""
    try:
      error = future.exception()
      if error is None:
        result = future.result()
        # The last token was never fed back.
        stored = np.concatenate([call.request.prompt_ids, result.tokens])[:-1]
        chain = page_chain.chain(stored, self._fleet.page_tokens, call.chain)
        self._end(flight, chain, result.tokens.size)
        call.future.set_result(result)
        return
      self._end(flight)
      call.failed.add(flight.replica)
      if not replica.alive:
        self._lose(flight.replica, replica, str(error))
      if self._may_resubmit(call, error):
        with self._lock:
          self._counts['resubmissions'] += 1
        self._send(call)
        return
    except Exception as failure:  # an error here must not leave the caller waiting
      error = failure
    call.future.set_exception(error)

  def _may_resubmit(self, call: _Call, error: BaseException) -> bool:
    if call.streamed or self._stop.is_set() or not isinstance(error, EngineError):
      return False
    return call.attempts < self.config.max_attempts

  def _end(self, flight: Flight, chain: list[bytes] = (), tokens: int | None = None):
    with self._lock:
      self._fleet.end(flight, chain, tokens)

  # --- Replicas that stop and come back.

  def _living(self):
    return [replica for replica in self._fleet.replicas if replica.alive]

  def _lose(self, number: int, replica: Serving, reason: str) -> None:
    """No request goes to the replica from now on; starts another one in its place."""
    with self._lock:
      if self._replicas[number] is not replica:
        return
      if not self._fleet.replicas[number].alive:
        return
      self._fleet.lose(number)
      self._counts['lost_replicas'] += 1
      for key in TOTALS:
        self._past[key] += self._latest[number][key]
      self._latest[number] = dict.fromkeys(TOTALS, 0)
      self._restarts.begin(number, reason)
    logging.warning('replica %d is lost: %s', number, reason)

  def _restart(self, number: int) -> None:
    """Makes a replica in place of one that has stopped."""
    self._replicas[number].stop()  # it may have memory that the new one needs
    self._adopt(number, self._make(number, *self._weights))

  def _adopt(self, number: int, replica: Serving) -> None:
    """Sends requests to a replica from now on; it has the latest weights before."""
    stats = replica.stats()
    replica.page_events()
    with self._publishing:
      variables, version = self._weights
      if stats['policy_version'] < version:
        if variables is None:
          raise EngineError(f'no weights of version {version} to give to it')
        replica.update_weights(variables, version)
      with self._lock:
        self._replicas[number] = replica
        self._fleet.replace(number, replica_stats.sizes(stats))
    self._restarts.reasons.pop(number, None)
    logging.info('replica %d serves again', number)

  def _run(self) -> None:
    while not self._stop.wait(self.config.observe_s):
      try:
        self.observe()
      except Exception:  # one failed look is not the end of the service
        logging.exception('the replicas could not be observed')
