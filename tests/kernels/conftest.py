"""Kernels without their device: interpreted as XLA loops, or on a simulated TPU.

Both are contexts that jax's caches know: a kernel that is interpreted in one test is
traced again where another lowers it for a device.
"""

from __future__ import annotations

import contextlib

import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def interpreted():
  """Kernels, for GPUs too, run as XLA loops on the CPU."""
  with pltpu.force_tpu_interpret_mode(True):
    yield


@pytest.fixture
def simulated(capsys):
  """A context in which TPU kernels run on a simulated TPU, where a race, a read of what
  was never written, or one out of bounds fails the test."""

  @contextlib.contextmanager
  def simulate(**more):
    params = pltpu.InterpretParams(
      detect_races=True,
      uninitialized_memory='nan',
      out_of_bounds_reads='raise',
      **more,
    )
    with pltpu.force_tpu_interpret_mode(params):
      yield

  yield simulate
  pltpu.reset_tpu_interpret_mode_state()
  assert 'RACE DETECTED' not in capsys.readouterr().out
