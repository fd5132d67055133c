"""The small model of the engine's tests, and the gateway tests' tokenizer."""

from tests.gateway.conftest import tok
from tests.pool.conftest import postgresql
from tests.rollout.conftest import engine, recording, serve, variables

__all__ = ['engine', 'postgresql', 'recording', 'serve', 'tok', 'variables']
