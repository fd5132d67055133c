"""A request's body, event by event: bounded however it is cut."""

import asyncio

import pytest

from m2jax.gateway import receiving
from m2jax.gateway.errors import ApiError, too_large


@pytest.mark.parametrize('chunks', [(11,), (6, 5), (10, 1), (0, 11)])
def test_a_body_above_its_limit(chunks):
  """In one piece as in several, and nothing of it is held afterwards."""
  bodies = receiving.Bodies(max_bytes=100)
  kind = {'type': 'http.request', 'more_body': True}
  events = [kind | {'body': bytes(n)} for n in chunks]

  async def receive():
    return events.pop(0)

  async def read():
    async with bodies.receive({'headers': []}, receive, 10, too_large('10')):
      pytest.fail('it was received')

  with pytest.raises(ApiError) as error:
    asyncio.run(read())
  assert error.value.status == 413 and bodies.held_bytes == 0 and not events
