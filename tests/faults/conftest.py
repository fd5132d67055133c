"""A private PostgreSQL server, and the gateway tests' tokenizer and gateways."""

from tests.gateway.conftest import serve, tok
from tests.pool.conftest import postgresql

__all__ = ['postgresql', 'serve', 'tok']
