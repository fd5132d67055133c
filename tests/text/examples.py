"""How many examples the properties of text get: they are cheap, and faults are rare."""

from hypothesis import settings

MANY = settings(max_examples=max(60, settings.default.max_examples))
