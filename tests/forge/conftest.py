"""The gateway tests' tokenizer."""

from tests.gateway.conftest import tok

__all__ = ['tok']
