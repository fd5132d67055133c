"""What is read of a request before its body is parsed: its key and its bytes."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Callable

from m2jax.gateway.errors import ApiError, busy


class Disconnected(Exception):
  """The client disconnected before its request was complete."""


def bearer(scope: dict) -> str:
  """The API key of a request. Raises ApiError (401) if there is none."""
  key = _bearer(scope)
  if key is None:
    raise _no_key('send "Authorization: Bearer KEY"')
  return key


def api_key(scope: dict) -> str:
  """The same, for clients that may send it as `x-api-key`, as Anthropic's do."""
  key = _bearer(scope)
  if key is None:
    names = [value for name, value in scope['headers'] if name == b'x-api-key']
    key = names[0].decode('latin-1').strip() if names else None
  if not key:
    raise _no_key('send "Authorization: Bearer KEY" or "x-api-key: KEY"')
  return key


def authorise(scope: dict, key: str) -> None:
  """Raises ApiError (401) unless this is the key of a request."""
  if not hmac.compare_digest(bearer(scope).encode(), key.encode()):
    raise ApiError(401, 'this key does not allow it', code='invalid_api_key')


def _bearer(scope: dict) -> str | None:
  for name, value in scope['headers']:
    if name == b'authorization':
      scheme, _, key = value.decode('latin-1').partition(' ')
      if scheme.lower() == 'bearer' and key.strip():
        return key.strip()
  return None


def _no_key(advice: str) -> ApiError:
  return ApiError(
    401,
    f'no API key: {advice}; the key identifies the session',
    code='invalid_api_key',
  )


class Bodies:
  """Counts the bytes of all bodies that are arriving or waiting to be read."""

  def __init__(self, max_bytes: int):
    self.max_bytes = max_bytes
    self.held_bytes = 0

  @contextlib.asynccontextmanager
  async def receive(
    self, scope: dict, receive: Callable, limit_bytes: int, too_large: ApiError
  ) -> AsyncIterator[bytearray]:
    """Receives a body; its bytes count until the context ends.

    Raises:
      ApiError: `too_large` above `limit_bytes`, or 429.
      Disconnected: the client has disconnected.
    """
    for name, value in scope['headers']:
      if name == b'content-length' and value.isdigit() and int(value) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
      more = True
      while more:
        event = await receive()
        if event['type'] == 'http.disconnect':
          raise Disconnected
        chunk = event.get('body', b'')
        more = event.get('more_body', False)
        if len(body) + len(chunk) > limit_bytes:
          raise too_large
        if self.held_bytes + len(chunk) > self.max_bytes:
          raise busy(
            f'bodies of more than max_unfinished_bytes={self.max_bytes} are arriving; '
            'try again'
          )
        body += chunk
        self.held_bytes += len(chunk)
      yield body
    finally:
      self.held_bytes -= len(body)
