"""A rollout engine in another process that serves as one in this process does.

Every request is an HTTP request of its own, over connections that stay open. A request
that is in flight when the engine ends fails with EngineError, and so do new ones until
the engine is there again; nothing has to be done then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import httpx
from absl import logging

from m2jax import frames
from m2jax.agents import http
from m2jax.forge.config import RemoteConfig
from m2jax.forge.remote import wire
from m2jax.rollout.api import (
  EngineError,
  GenerateRequest,
  Handle,
  NewTokens,
  PageEvent,
  Serving,
)
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving import requests
from m2jax.rollout.tiers.page_journal import PageJournal

_FRAME_LIMIT_BYTES = 1 << 31  # expert ids of a long context


@dataclasses.dataclass(eq=False)
class _Job:
  """A request in progress."""

  request: GenerateRequest
  on_tokens: Callable[[NewTokens], None] | None
  future: concurrent.futures.Future
  id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
  # The engine knows its id, or it has ended: before, it cannot be cancelled.
  known: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class RemoteScheduler(Serving):
  """The engine at a URL. `start` and `stop` once."""

  def __init__(
    self,
    url: str,
    vocab_size: int,
    engine: EngineConfig,
    key: str = '',
    config: RemoteConfig | None = None,
  ):
    """Makes no connection yet.

    Args:
      url: URL of the engine's server.
      vocab_size, engine: the engine's vocabulary and config, against which requests are
        checked here.
      key: the shared secret.
    """
    self._url, self._config = url.rstrip('/'), config or RemoteConfig()
    self._vocab_size, self._engine = vocab_size, engine
    self._headers = {'authorization': f'Bearer {key}'} if key else {}
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._run, name='remote-engine', daemon=True)
    self._lock = threading.Lock()
    self._stopped = False
    self._stats: dict[str, Any] = {}
    self._down: str | None = f'{url} has not answered yet'
    self._journal, self._epoch, self._after = PageJournal(), '', 0
    self._tasks: set[asyncio.Task] = set()  # on the loop

  def start(self) -> RemoteScheduler:
    """Starts the thread that talks to the engine."""
    self._thread.start()
    asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
    return self

  def stop(self) -> None:
    """Ends the thread; unfinished requests fail."""
    with self._lock:
      stopped, self._stopped = self._stopped, True
    if stopped or self._thread.ident is None:
      return
    asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def __enter__(self) -> RemoteScheduler:
    return self.start()

  def __exit__(self, *exc):
    self.stop()

  @property
  def context_tokens(self) -> int:
    return self._engine.context_tokens

  @property
  def alive(self) -> bool:
    """Whether the engine answered the last request for its statistics."""
    return self.stopped_reason is None

  @property
  def stopped_reason(self) -> str | None:
    """Why the engine could not be reached, if it could not."""
    return 'it was stopped' if self._stopped else self._down

  def stats(self) -> dict[str, Any]:
    """The engine's statistics when it last answered; empty before."""
    return self._stats

  def page_events(self) -> list[PageEvent]:
    """The changes that the engine has reported so far."""
    return self._journal.read()

  def update_weights(self, variables: Any, version: int) -> None:
    """Fails: the engine takes the weights that the learner publishes."""
    raise EngineError(f'{self._url} takes new weights from where they are published')

  def wait(self, timeout_s: float) -> bool:
    """Waits until the engine answers; False after the timeout."""
    ends_s = time.monotonic() + timeout_s
    while not self.alive and time.monotonic() < ends_s:
      time.sleep(0.02)
    return self.alive

  def submit(
    self,
    request: GenerateRequest,
    on_tokens: Callable[[NewTokens], None] | None = None,
  ) -> Handle:
    requests.check(request, self._vocab_size, self._engine)
    if request.grammar is not None:
      raise ValueError('grammar: an engine in another process takes none')
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    job = _Job(request, on_tokens, future)
    with self._lock:
      if self._stopped:
        raise EngineError('the connection to the rollout engine was stopped')
      self._loop.call_soon_threadsafe(self._begin, job)
    return Handle(future, lambda: self._cancel(job))

  def _cancel(self, job: _Job) -> None:
    with self._lock:
      if not self._stopped and not job.future.done():
        self._loop.call_soon_threadsafe(self._spawn, self._send_cancel(job))

  # --- The thread.

  def _run(self) -> None:
    asyncio.set_event_loop(self._loop)
    self._loop.run_forever()

  async def _open(self) -> None:
    self._client = http.make_client()
    self._spawn(self._poll())

  async def _close(self) -> None:
    tasks = list(self._tasks)
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self._client.aclose()

  def _begin(self, job: _Job) -> None:
    self._spawn(self._generate(job))

  def _spawn(self, coroutine) -> None:
    task = self._loop.create_task(coroutine)
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  def _build(self, method: str, path: str, content: bytes = b'') -> httpx.Request:
    config = self._config
    timeout = httpx.Timeout(config.silence_timeout_s, connect=config.connect_timeout_s)
    return httpx.Request(
      method,
      self._url + path,
      headers=self._headers,
      content=content,
      extensions={'timeout': timeout.as_dict()},
    )

  async def _poll(self) -> None:
    while True:
      try:
        response = await self._client.send(self._build('GET', '/health'))
        body = json.loads(response.content)
        theirs, ours = body.get('context_tokens'), self.context_tokens
        if response.status_code == 200 and theirs != ours:
          self._down = (
            f"{self._url} has context_tokens={theirs}, this role's config {ours}: "
            'start both with the same config'
          )
        elif response.status_code == 200:
          self._stats, self._down = body['stats'], None
          if self._journal.is_read:
            await self._read_pages()
        else:
          self._down = body.get('stopped_reason') or _reason(response)
      except (
        *(httpx.HTTPError, frames.Malformed),
        *(ValueError, KeyError, AttributeError),
      ) as error:
        self._down = f'{self._url}: {error!r}'
      await asyncio.sleep(self._config.poll_s)

  async def _read_pages(self) -> None:
    path = f'/pages?epoch={self._epoch}&after={self._after}'
    response = await self._client.send(self._build('GET', path))
    response.raise_for_status()
    self._epoch, self._after, events = wire.decode_pages(response.content)
    for event in events:
      self._journal.add(*event)

  async def _send_cancel(self, job: _Job) -> None:
    await job.known.wait()
    if job.future.done():
      return
    try:
      await self._client.send(self._build('POST', '/cancel', job.id.encode()))
    except httpx.HTTPError as error:  # the request itself fails too
      logging.debug('cancel: %r', error)

  async def _generate(self, job: _Job) -> None:
    try:
      result = await self._result(job)
    except EngineError as error:
      job.future.set_exception(error)
    except asyncio.CancelledError:
      job.future.set_exception(
        EngineError('the connection to the rollout engine was stopped')
      )
    except (httpx.HTTPError, frames.Malformed) as error:
      failed = EngineError(f'the rollout engine at {self._url} failed: {error!r}')
      failed.__cause__ = error
      if isinstance(error, httpx.TransportError):
        self._down = str(failed)  # until it answers again
      job.future.set_exception(failed)
    except Exception as error:  # such as one of on_tokens
      job.future.set_exception(error)
    else:
      job.future.set_result(result)
    finally:
      job.known.set()

  async def _result(self, job: _Job):
    content = wire.encode_request(job.id, job.request)
    request, result = self._build('POST', '/generate', content), None
    response = await self._client.send(request, stream=True)
    job.known.set()
    try:
      if response.status_code != 200:
        await response.aread()
        raise EngineError(f'the rollout engine: {_reason(response)}')
      async for frame in frames.stream(response.aiter_raw(), _FRAME_LIMIT_BYTES):
        match frame.kind:
          case 'tokens':
            if job.on_tokens is not None:
              job.on_tokens(wire.decode_tokens(frame))
          case 'result':
            result = wire.decode_result(frame)
          case 'error':
            raise EngineError(frame.text('reason'))
          case 'alive':
            continue
          case kind:
            raise frames.Malformed(f'a frame of kind {kind[:40]}')
    finally:
      await response.aclose()
    if result is None:
      raise frames.Malformed('the stream ended without a result')
    return result


def _reason(response: httpx.Response) -> str:
  try:
    return f'HTTP {response.status_code}: {response.json()["error"]["message"]}'
  except (ValueError, KeyError, TypeError):
    return f'HTTP {response.status_code}: {response.text[:200]}'
