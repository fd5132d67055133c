"""An httpx client shared by many agents.

For every request httpcore's connection pool checks every connection with a system call:
at 64 agents that takes ten times the CPU time of the request itself. Agents connect to
one host, so a stack of one-connection transports is sufficient, at a cost that does not
grow with the number of agents.
"""

from __future__ import annotations

import httpx

_KEEPALIVE_S = 300.0


class StackedTransport(httpx.AsyncBaseTransport):
  """Sends each request over the connection freed last, or a new one if all are busy.

  The number of connections is bounded only by the number of concurrent requests.
  """

  def __init__(self):
    # Shared by all transports: loading certificates takes milliseconds.
    self._tls = httpx.create_ssl_context()
    self._free: list[httpx.AsyncHTTPTransport] = []
    self._closed = False

  async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
    transport = self._free.pop() if self._free else self._new()
    try:
      response = await transport.handle_async_request(request)
    except BaseException:
      await transport.aclose()
      raise
    response.stream = _Returning(response.stream, transport, self._release)
    return response

  def _new(self) -> httpx.AsyncHTTPTransport:
    limits = httpx.Limits(
      max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_S
    )
    return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)

  async def _release(self, transport: httpx.AsyncHTTPTransport):
    if self._closed:
      await transport.aclose()
    else:
      self._free.append(transport)

  async def aclose(self):
    self._closed = True
    while self._free:
      await self._free.pop().aclose()


class _Returning(httpx.AsyncByteStream):
  """A response body that returns its connection to the stack when it is closed."""

  def __init__(self, stream, transport: httpx.AsyncHTTPTransport, release):
    self._stream, self._transport, self._release = stream, transport, release

  async def __aiter__(self):
    async for chunk in self._stream:
      yield chunk

  async def aclose(self):
    try:
      await self._stream.aclose()
    except BaseException:
      await self._transport.aclose()
      raise
    await self._release(self._transport)


def make_client() -> httpx.AsyncClient:
  """Makes a client for all agents of one event loop."""
  return httpx.AsyncClient(
    transport=StackedTransport(), timeout=None, trust_env=False, follow_redirects=False
  )
