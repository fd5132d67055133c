"""The gateway tests' fixtures: attempts are tested with the real gateway."""

from tests.gateway.conftest import serve, tok

__all__ = ['serve', 'tok']
