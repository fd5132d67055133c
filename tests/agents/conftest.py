"""The gateway tests' fixtures: agents are tested with the real gateway."""

from tests.gateway.conftest import serve, tok

__all__ = ['serve', 'tok']
