"""Sites for sandboxes with Chromium; without Chromium these tests are skipped."""

from __future__ import annotations

import importlib.util

import pytest

from m2jax import sandbox
from m2jax_pipelines import appdev


@pytest.fixture(scope='session')
def sites(tmp_path_factory):
  """An empty directory for packages, if this machine can run the verifier."""
  if reason := appdev.unavailable():
    pytest.skip(reason)
  if importlib.util.find_spec('datasketch') is None:
    pytest.skip('pip install -e ./m2jax_pipelines')
  return tmp_path_factory.mktemp('sites')


@pytest.fixture(autouse=True)
def _no_sandbox():
  """A machine without sandboxes skips, with the reason."""
  try:
    yield
  except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error))
