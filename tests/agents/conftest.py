"""The gateway tests' fixtures: agents are judged against the real gateway."""

from tests.gateway.conftest import serve, tok

__all__ = ['serve', 'tok']
