"""No test of a kernel meets what another file has traced."""

import jax
import pytest


@pytest.fixture(scope='module', autouse=True)
def nothing_traced():
  """Kernels are traced once a shape, interpreted in one file and for real in another:
  whichever came first would stay."""
  jax.clear_caches()
  yield
  jax.clear_caches()
