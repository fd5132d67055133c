"""A prefill engine in another process, as the decode process sees it (`Prefills`).

  layout = handover.layout(cfg, engine_config, how.part_pages)
  prefills = RemotePrefills('unix:/run/prefill.sock', layout, version=version)
  serving = Disaggregated(engine, variables, prefills, version).start()

A thread connects, receives, and connects again when the connection has ended; what was
asked for until then fails, so that the decode engine prefills it. Everything that is
received is checked before the engine sees it: a part must be of the size that this
engine's layout says, with tokens and expert ids in range, finite keys and values, and
weights no older than those of the ask.

A prefill process that serves several engines has the newest weights of any of them.
Pages of weights that this engine does not have yet are not used, and nothing more is
asked until it has them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from m2jax.frames import Frame, Malformed
from m2jax.rollout.disaggregation import connection, handover
from m2jax.rollout.disaggregation.handover import (
  Ask,
  HandoverError,
  NewerWeights,
  Part,
  Receive,
)
from m2jax.rollout.engine.pages import Pages


@dataclasses.dataclass(frozen=True)
class Timeouts:
  """Seconds. Attributes:
  frame_s: time for a frame, and for each step of the opening.
  silence_s: time without any frame after which the connection is closed.
  retry_s, max_retry_s: wait before connecting again; doubled after each failure.
  avoid_s: time without asking after asks have been given up.
  """

  frame_s: float = 10.0
  silence_s: float = 10.0
  retry_s: float = 0.1
  max_retry_s: float = 5.0
  avoid_s: float = 60.0


class RemotePrefills:
  """See the module.

  `available` while it is connected and can compute with this side's weights.
  """

  layout = None  # each connection's is checked

  def __init__(
    self,
    address: str,
    layout: dict[str, Any],
    *,
    version: int = 0,
    key: bytes | None = None,
    run_id: str = '',
    timeouts: Timeouts | None = None,
  ):
    """Does not connect yet.

    Args:
      layout: `handover.layout` of the decode engine.
      version: version of the decode engine's weights.
      key, run_id: those of `PrefillServer`.
    """
    connection.check_key(key)
    self._address = connection.Address.parse(address)
    self._mine, self._key, self._run_id = layout, key, run_id
    self._timeouts = timeouts or Timeouts()
    self._lock = threading.Lock()
    self._version = version
    self._channel: connection.Channel | None = None
    self._asks: dict[int, tuple[Ask, Receive]] = {}
    self._numbers = itertools.count()
    self._newest: int | None = None  # version that the other side has
    self._cannot_load = False  # the other side, this side's version
    self._avoid_until = -math.inf
    self._theirs: dict[str, float] = {}
    self._counts = dict(connections=0, losses=0, protocol_errors=0)
    self._stopping = threading.Event()
    self._tried = threading.Event()
    self._misfit: ValueError | None = None
    self._thread = threading.Thread(target=self._run, daemon=True, name='handover')

  @property
  def available(self) -> bool:
    avoided = time.monotonic() < self._avoid_until
    usable = not self._cannot_load and not self._ahead
    return self._channel is not None and usable and not avoided

  @property
  def _ahead(self) -> bool:
    """Whether the other side would compute with weights that this one lacks."""
    return self._newest is not None and self._newest > self._version

  def start(self, *, warmup: bool = True) -> RemotePrefills:
    """Connects; if no server is there yet, keeps trying in a thread.

    Raises:
      ValueError: the prefill engine's sizes or run_id do not fit; names the field.
    """
    del warmup
    self._thread.start()
    self._tried.wait(2 * self._timeouts.frame_s)
    if self._misfit is not None:
      self.stop()
      raise self._misfit
    return self

  def stop(self) -> None:
    self._stopping.set()
    if (channel := self._channel) is not None:
      channel.close()
    if self._thread.ident is not None:
      self._thread.join()

  def stats(self) -> dict[str, float]:
    """The prefill process' own, as it last sent them, and of the connection: connected,
    connections, losses and protocol_errors, and ahead: whether its weights are newer
    than this side's."""
    connected = float(self._channel is not None)
    own = dict(connected=connected, ahead=float(self._ahead))
    return {**self._theirs, **self._counts, **own}

  def update_weights(self, variables: Any, version: int) -> None:
    """Has the prefill process load a version; its own source has the weights."""
    del variables
    with self._lock:
      self._version, self._cannot_load = version, False
      channel = self._channel
    if channel is not None:
      channel.send('weights', version=version)

  def ask(self, ask: Ask, receive: Receive) -> Callable[[], None]:
    """See `Prefills`."""
    number = next(self._numbers)
    with self._lock:
      channel = self._channel
      if channel is None:
        raise HandoverError('the prefill process is not connected')
      self._asks[number] = ask, receive
    fields = dict(number=number, first_page=ask.first_page, version=ask.version)
    channel.send('ask', dict(tokens=np.asarray(ask.tokens, np.int32)), **fields)

    def cancel():
      with self._lock:
        known = self._asks.pop(number, None)
      if known is not None:
        channel.send('cancel', number=number)

    return cancel

  def give_up(self, reason: str) -> None:
    """Closes the connection, which may be to a process that hangs."""
    logging.warning('the prefill process is given up: %s', reason)
    self._avoid_until = time.monotonic() + self._timeouts.avoid_s
    if (channel := self._channel) is not None:
      channel.close()

  # --- The thread.

  def _run(self) -> None:
    retry_s = self._timeouts.retry_s
    while not self._stopping.is_set():
      try:
        channel = self._connect()
      except (OSError, Malformed, ValueError) as error:
        if isinstance(error, ValueError):
          self._misfit = self._misfit or error
        self._failed(error)
      else:
        retry_s = self._timeouts.retry_s
        self._tried.set()
        self._serve(channel)
      self._tried.set()
      self._stopping.wait(retry_s)
      retry_s = min(2 * retry_s, self._timeouts.max_retry_s)

  def _failed(self, error: Exception) -> None:
    self._counts['protocol_errors'] += isinstance(error, (Malformed, ValueError))
    logging.log_every_n_seconds(
      logging.WARNING, 'no prefill process at %s: %s', 30, self._address.target, error
    )

  def _connect(self) -> connection.Channel:
    sock = self._address.connect(self._timeouts.frame_s)
    try:
      hello = connection.open_client(sock, self._key, self._timeouts.frame_s)
      theirs = hello.fields.get('layout')
      if not isinstance(theirs, dict):
        raise hello.wrong('layout', 'an object')
      theirs = dict(theirs, run_id=hello.text('run_id'))
      handover.check_layouts(theirs, dict(self._mine, run_id=self._run_id))
      version = hello.version('version')
    except BaseException:
      sock.close()
      raise
    channel = connection.Channel(
      sock,
      max_body_bytes=self._body_bytes(self._mine['part_pages']),
      max_unsent_bytes=1 << 28,
      timeout_s=self._timeouts.frame_s,
    )
    with self._lock:
      if version != self._version:
        channel.send('weights', version=self._version)
      self._channel, self._newest, self._cannot_load = channel, version, False
      self._counts['connections'] += 1
    return channel

  def _serve(self, channel: connection.Channel) -> None:
    """Until the connection ends."""
    heard = pinged = time.monotonic()
    try:
      while not self._stopping.is_set():
        frame = channel.receive()
        now = time.monotonic()
        if frame is not None:
          heard = now
          self._handle(frame)
        elif now > heard + self._timeouts.silence_s:
          raise TimeoutError('the prefill process is silent')
        if now > pinged + connection.IDLE_S:
          pinged = now
          channel.send('ping')
      error = None
    except (OSError, Malformed) as found:
      error = found
      self._failed(error)
    with self._lock:
      self._channel = None
      asks, self._asks = list(self._asks.values()), {}
      self._counts['losses'] += not self._stopping.is_set()
    channel.join()
    for _, receive in asks:
      receive(HandoverError(f'the connection has ended: {error}'))

  def _handle(self, frame: Frame) -> None:
    match frame.kind:
      case 'part':
        self._part(frame)
      case 'failed':
        self._fail(frame.integer('number'), frame.text('reason'))
      case 'weights_failed':
        self._weights_failed(frame)
      case 'pong':
        self._theirs = _numbers(frame)
        self._has(self._theirs.get('policy_version'))
      case kind:
        raise Malformed(f'a frame of kind {kind[:40]}')

  def _part(self, frame: Frame) -> None:
    number, part = frame.integer('number'), self._decode(frame)
    oldest, newest = part.versions
    self._has(newest)
    with self._lock:
      ask, receive = self._asks.get(number, (None, None))
      if ask is None:  # cancelled
        return
      if oldest < ask.version:
        raise Malformed(f'part: version {oldest} for an ask of {ask.version}')
      lacks, channel = newest > self._version, self._channel
      if lacks or part.held >= len(ask.tokens) - 1:
        del self._asks[number]
    if lacks:
      channel.send('cancel', number=number)
      part = NewerWeights(f'pages of version {newest}, which this engine lacks')
    receive(part)

  def _has(self, version: Any) -> None:
    """Notes a version that the other side has loaded."""
    if type(version) is not int:
      return
    with self._lock:
      self._newest = max(self._newest, version)
      if version >= self._version:
        self._cannot_load = False

  def _fail(self, number: int, reason: str) -> None:
    with self._lock:
      _, receive = self._asks.pop(number, (None, None))
    if receive is not None:
      receive(HandoverError(reason))

  def _weights_failed(self, frame: Frame) -> None:
    """Nothing more is asked until it can load them, or there are other weights."""
    version, reason = frame.version('version'), frame.text('reason')
    with self._lock:
      if version != self._version:
        return
      self._cannot_load = True
      asks, channel = list(self._asks), self._channel
    logging.warning('the prefill process cannot load version %d: %s', version, reason)
    for number in asks:
      channel.send('cancel', number=number)
      self._fail(number, f'it cannot load version {version}')

  def _body_bytes(self, pages: int) -> int:
    found = [x for x in handover.shapes(self._mine, pages) if x is not None]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in found)

  def _decode(self, frame: Frame) -> Part:
    """A part of a frame; raises Malformed."""
    mine, number = self._mine, frame.integer('pages', 1, self._mine['part_pages'])
    within = dict(
      tokens=(0, mine['vocab_size']),
      experts=(-1, mine['num_experts']),
      depth=(0, mine['draft_tokens'] + 1),
    )
    shapes = handover.shapes(mine, number)._asdict()
    found = Pages(
      **{
        name: x and frame.array(name, x[1], x[0], within.get(name))
        for name, x in shapes.items()
      }
    )
    if not handover.finite(found):
      raise Malformed('part: keys or values that are not finite')
    oldest, newest = frame.version('oldest'), frame.version('newest')
    if oldest > newest:
      raise Malformed(f'part: versions {oldest} to {newest}')
    first, held = frame.integer('first_page'), frame.integer('held')
    return Part(first, held, (oldest, newest), found)


def _numbers(frame: Frame) -> dict[str, float]:
  """The statistics of another process that can be reported."""
  stats = frame.fields.get('stats')
  if not isinstance(stats, dict) or len(stats) > 100:
    raise frame.wrong('stats', 'an object of at most 100 numbers')
  ok = lambda x: type(x) in (int, float) and abs(x) < 2**63  # not NaN either
  return {key[:64]: value for key, value in stats.items() if ok(value)}
