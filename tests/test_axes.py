"""Hints of arrays are checked by `make test-types`, and only there (conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from m2jax.moe import experts
from m2jax.rl.estimators import cispo

_ROOT = Path(__file__).parent.parent
_T, _D, _E, _F, _K = 4, 8, 3, 16, 2

typed = pytest.mark.skipif(
  'TEST_TYPES' not in os.environ, reason='hints are checked by make test-types'
)

# Arguments that disagree are broadcast without an error.
_UNCHECKED = """
import sys
import jax.numpy as jnp
from m2jax.rl.estimators import cispo
one = jnp.ones(4)
assert cispo.loss(one, one, jnp.ones((2, 4)), one).shape == (2, 4)
assert 'beartype' not in sys.modules
"""


def _expert_arrays(**replaced):
  shapes = dict(
    x=(_T, _D), weights=(_T, _K), gate=(_E, _D, _F), up=(_E, _D, _F), down=(_E, _F, _D)
  )
  arrays = {name: jnp.ones(shape) for name, shape in shapes.items()}
  return arrays | dict(ids=jnp.zeros((_T, _K), jnp.int32)) | replaced


@typed
@pytest.mark.parametrize(
  'name, wrong, axis',
  [
    ('weights', np.ones((_T, _K + 1)), f'k={_K}'),
    ('down', np.ones((_E, _D, _F)), f'F={_F}'),
    ('ids', np.zeros((_T, _K)), 'T k'),
  ],
)
def test_an_argument_of_other_axes_or_dtype_raises(name, wrong, axis):
  """The error names the argument, and the axis with the size that others gave it."""
  assert experts.apply(**_expert_arrays()).shape == (_T, _D)
  with pytest.raises(TypeCheckError) as error:
    experts.apply(**_expert_arrays(**{name: wrong}))
  assert f"parameter '{name}'" in str(error.value)
  assert axis in str(error.value)


@typed
def test_terms_of_other_axes_raise():
  """Guards the next test, which makes the same call without checks."""
  one = jnp.ones(4)
  with pytest.raises(TypeCheckError, match=r'\*M'):
    cispo.loss(one, one, jnp.ones((2, 4)), one)


def test_a_run_does_not_check():
  """Plain Python makes the same call; it does not even import the checker."""
  done = subprocess.run(
    [sys.executable, '-c', _UNCHECKED], cwd=_ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
