"""The virtual environment of the tests, as agents in a sandbox see it."""

import pathlib
import sys

import pytest

# A command's /tmp is its own, so an environment that is there cannot be shown to it.
needs_environment = pytest.mark.skipif(
  pathlib.Path(sys.prefix).is_relative_to('/tmp'),
  reason='the virtual environment is below /tmp, where a sandbox hides it',
)
