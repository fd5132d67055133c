"""Compiled programs are stored: the same figures without compiling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from m2jax.plan import compile as compile_lib
from m2jax.plan import programs


@pytest.fixture
def program():
  mesh = jax.make_mesh((1,), ('a',))
  place = jax.NamedSharding(mesh, jax.P())
  x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=place)
  return lambda f: programs.Program('micro', jax.jit(f), (x,), 1)


def test_a_stored_program_is_not_compiled_again(program, tmp_path, monkeypatch):
  """Another program is, and so is the same with other options: a figure of a program
  that is no longer the code's would be in the table for good."""
  compiled = []

  def count(name, lowered, options):
    compiled.append(name)
    return original(name, lowered, options)

  original = compile_lib._compile
  monkeypatch.setattr(compile_lib, '_compile', count)

  def run(f, **options):
    return compile_lib.compile_program(program(f), options, 'cpu', tmp_path)

  first = run(lambda x: x @ x)
  again = run(lambda x: x @ x)
  assert len(compiled) == 1
  assert again == first
  run(lambda x: x @ x + 1)
  assert len(compiled) == 2
  run(lambda x: x @ x, xla_cpu_enable_fast_math=False)
  assert len(compiled) == 3
