"""The gateway in another process: its sessions, its health and its counters."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
from absl import logging

from m2jax.agents import http
from m2jax.gateway import counters

_TIMEOUT_S = 30.0
_RETRY_S = 0.5  # between attempts
_PATIENCE_S = 60.0  # of `open`, with a gateway that cannot be reached


class SessionClient:
  """`open` and `close` of the gateway's sessions, on the loop of the agents.

  A gateway that cannot be reached, such as one that restarts, is tried again for a
  minute; then `open` raises ConnectionError, which is an infrastructure failure of the
  episode. `close` does not try again: it leaves the session to the gateway.
  """

  def __init__(self, url: str, secret: str):
    self._url = url.rstrip('/') + '/v1/sessions'
    self._headers = {'authorization': f'Bearer {secret}'}
    self._client: httpx.AsyncClient | None = None

  async def open(
    self, key: str, mode: str = 'training', name: str | None = None
  ) -> None:
    """Opens a session; `name` is that of its records, or None: the key."""
    body = json.dumps({'key': key, 'mode': mode, 'name': name}).encode()
    response = await self._send('POST', body, _PATIENCE_S)
    # A retry after a lost response finds it open: keys are unique.
    if response.status_code not in (201, 409):
      raise ConnectionError(
        f'the gateway did not open a session: HTTP {response.status_code}: '
        f'{response.text[:200]}'
      )

  async def close(self, key: str) -> None:
    try:
      await self._send('DELETE', json.dumps({'key': key}).encode(), patience_s=0.0)
    except ConnectionError as error:
      logging.debug('a session was not closed: %s', error)

  async def _send(self, method: str, body: bytes, patience_s: float) -> httpx.Response:
    if self._client is None:
      self._client = http.make_client()
    timeout = httpx.Timeout(_TIMEOUT_S).as_dict()
    ends_s = time.monotonic() + patience_s
    while True:
      request = httpx.Request(
        *(method, self._url),
        headers=self._headers,
        content=body,
        extensions={'timeout': timeout},
      )
      try:
        response = await self._client.send(request)
        if response.status_code != 503:
          return response
        failure = f'HTTP 503: {response.text[:200]}'
      except httpx.TransportError as error:
        failure = repr(error)
      if time.monotonic() >= ends_s:
        raise ConnectionError(
          f'the gateway at {self._url} cannot be reached: {failure}'
        )
      await asyncio.sleep(_RETRY_S)


class GatewayClient:
  """What the learner and the agents' process ask the gateway; from any thread.

  Beyond loopback only the key `view` gets statistics and counters.
  """

  def __init__(self, url: str, key: str = ''):
    self._url = url.rstrip('/')
    headers = {'authorization': f'Bearer {key}'} if key else {}
    self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    self._lock = threading.Lock()  # the counters are asked for by one thread at a time
    self._counters: dict[str, int] = {}

  @property
  def base_url(self) -> str:
    """The base URL for agents."""
    return self._url + '/v1'

  def health(self) -> tuple[bool, dict[str, Any]]:
    """Whether gateway and engine serve, and the engine's statistics."""
    try:
      response = self._client.get(self._url + '/health')
      return response.status_code == 200, response.json().get('engine', {})
    except (httpx.HTTPError, ValueError, AttributeError) as error:
      return False, {'error': repr(error)}

  def counters(self) -> dict[str, int]:
    """See `Gateway.counters`; the last known ones if it cannot be reached."""
    try:
      reply = self._client.get(self._url + '/metrics')
      found = counters.parse(reply.raise_for_status().text)
    except (httpx.HTTPError, ValueError) as error:
      logging.warning('the counters of the gateway are not known: %r', error)
      return dict(self._counters)
    with self._lock:
      self._counters = found
    return dict(found)

  def close(self) -> None:
    self._client.close()
