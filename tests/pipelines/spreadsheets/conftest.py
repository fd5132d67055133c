"""The verifier of spreadsheets as it runs: beside its modules, not in a package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from m2jax_pipelines import spreadsheets


@pytest.fixture(scope='module')
def grade():
  here = str(Path(spreadsheets.__file__).parent)
  sys.path.insert(0, here)
  try:
    import engines  # noqa: F401  which the verifier imports when it judges
    import grade as module

    yield module
  finally:
    sys.path.remove(here)
    for name in ('grade', 'guard', 'engines', 'seen', 'contrast', 'rewrite'):
      sys.modules.pop(name, None)
