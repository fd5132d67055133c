"""Computations whose results for a token do not depend on the tokens beside it.

The order in which XLA adds up, and what it fuses, depend on the shapes of the arrays
and on the program around them: on a CPU most numbers of a matmul's row differ between
16 and 512 rows in fp32. A loop over tiles of `TILE` tokens is one computation of one
shape wherever it is called: the number of tiles is hidden from the compiler, which
could else inline the body, and barriers keep its operations apart from those around.

Used where `ModelConfig.numerics` is 'invariant'. Gradients are those of the ordinary
computation on the same arguments.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TILE = 16


def rows(f: Callable[[Any, Any], Any], tokens: Any, shared: Any, tiled: bool) -> Any:
  """f(tokens, shared), in tiles if `tiled`.

  Args:
    f: computes each token by itself; closes over no arrays.
    tokens: a tree of arrays [T, …]; so are the results.
    shared: a tree of arrays, such as weights.
    tiled: whether to compute in tiles; else this is f itself.
  """
  if not tiled:
    return f(tokens, shared)
  return with_gradient_of(f, lambda *args: _in_tiles(f, *args))(tokens, shared)


def with_gradient_of(plain: Callable, forward: Callable) -> Callable:
  """`forward`, which differs from `plain` in rounding only, with its gradient."""
  run = jax.custom_vjp(forward)
  run.defvjp(
    lambda *args: (forward(*args), args),
    lambda args, d_out: jax.vjp(plain, *args)[1](d_out),
  )
  return run


def _in_tiles(f, tokens, shared):
  count = len(jax.tree.leaves(tokens)[0])
  n = max(-(-count // TILE), 1)

  def cut(x):
    x = jnp.pad(x, [(0, n * TILE - count)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(n, TILE, *x.shape[1:])

  def body(i, out):
    tile = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tiles)
    new = lax.optimization_barrier(f(lax.optimization_barrier(tile), shared))
    return jax.tree.map(
      lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), out, new
    )

  tiles = jax.tree.map(cut, tokens)
  like = jax.eval_shape(f, jax.tree.map(lambda x: x[0], tiles), shared)
  out = jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), like)
  out = lax.fori_loop(0, lax.optimization_barrier(jnp.int32(n)), body, out)
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)
