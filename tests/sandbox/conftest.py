"""One event loop, and so one supervisor, for all sandbox tests of a process."""

from __future__ import annotations

import asyncio
import gc

import pytest

from m2jax import sandbox


@pytest.fixture(scope='session')
def run():
  """Runs a coroutine on the shared loop."""
  with asyncio.Runner() as runner:
    yield runner.run
    runner.run(sandbox.shutdown())


@pytest.fixture
def make(run):
  """Makes sandboxes and destroys them after the test."""
  boxes = []

  def make(**kwargs) -> sandbox.Sandbox:
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    boxes.append(run(sandbox.create(**kwargs)))
    return boxes[-1]

  yield make
  for box in boxes:
    run(box.destroy())


@pytest.fixture
def no_garbage():
  """Nothing of other tests, such as their sockets, is collected during a test."""
  gc.freeze()
  yield
  gc.unfreeze()
