"""A process that compiles for its own devices traces no branch of another platform, and
can still lower ahead of time for others."""

import jax
import jax.numpy as jnp
import pytest

from m2jax import platforms


@pytest.fixture
def function():
  """A jitted function, and the platforms that it was traced for."""
  if jax.default_backend() != 'cpu':
    pytest.skip('beside an accelerator all branches are traced')
  traced = []

  def branch(name, x):
    traced.append(name)
    return jnp.sin(x) if name == 'tpu' else jnp.cos(x)

  @jax.jit
  def f(x):
    branches = {name: lambda x, name=name: branch(name, x) for name in ('cpu', 'tpu')}
    return platforms.dependent(x, **branches, default=lambda x: branch('default', x))

  return f, traced


def test_only_the_own_branch_is_traced(function):
  """Values and gradients are those of a program that has all branches."""
  f, traced = function
  got = jax.value_and_grad(f)(1.0)
  assert set(traced) == {'cpu'}
  with platforms.any_platform():
    want = jax.value_and_grad(f)(1.0)
  assert set(traced) == {'cpu', 'tpu', 'default'}
  assert got == want == (jnp.cos(1.0), -jnp.sin(1.0))


def test_lowered_ahead_of_time_after_it_ran(function):
  """What was traced for this process is not lowered for a TPU, nor the reverse."""
  f, traced = function
  f(1.0)
  with platforms.any_platform():
    lowered = f.trace(1.0).lower(lowering_platforms=('tpu',)).as_text()
  assert 'sine' in lowered and 'cosine' not in lowered
  traced.clear()
  assert f(1.0) == jnp.cos(1.0) and not traced


def test_no_branch_of_its_own(function):
  """`default` stands for a platform that has none."""
  assert platforms.dependent(1.0, tpu=jnp.sin, default=jnp.cos) == jnp.cos(1.0)
