"""Paged attention's cases, and what must come out, by NumPy loops in float64."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from m2jax.kernels import paged_attention

ROWS, KV_HEADS, GROUP, DIM, LAYERS = 3, 2, 3, 128, 2
PAGES, TABLE = 24, 7  # of the cache; of a row


class Case(NamedTuple):
  q: jax.Array
  cache: paged_attention.Cache
  position: np.ndarray
  subtree_end: np.ndarray | None = None


def random_tree(rng, tokens: int) -> np.ndarray:
  """subtree_end [tokens] of one random tree in depth-first order."""
  end, path = np.zeros(tokens, np.int32), []
  for i in range(tokens):
    if path:
      path = path[: rng.integers(1, len(path) + 1)]
    path.append(i)
    end[path] = i + 1
  return end


def case(
  rng, chunk: int, *, page=16, dtype=jnp.float32, unstored=np.nan, tree=False
) -> Case:
  """Rows of unlike lengths, one of them empty or not at all, that share pages.

  Args:
    unstored: is in the cache where no row has a token.
  """
  S = TABLE * page
  starts = rng.integers(0, S - chunk + 1, ROWS)
  counts = rng.integers(0, chunk + 1, ROWS)
  at = np.arange(chunk)
  position = np.where(at < counts[:, None], starts[:, None] + at, -1)
  position = position.astype(np.int32)
  tables = rng.permutation(PAGES - 1)[: ROWS * TABLE] + 1
  tables = tables.reshape(ROWS, TABLE).astype(np.int32)
  shared = rng.integers(0, TABLE)
  tables[1, :shared] = tables[0, :shared]
  used = -(-(position.max(1) + 1) // page)
  tables[np.arange(TABLE) >= used[:, None]] = 0
  stored = np.zeros((PAGES, page), bool)
  for row, last in enumerate(position.max(1)):
    p = np.arange(last + 1)
    stored[tables[row, p // page], p % page] = True
  shape = (LAYERS, KV_HEADS, PAGES, page, DIM)
  k, v = (rng.normal(size=shape).astype(np.float32) for _ in 'kv')
  for x in (k, v):
    x[:, :, ~stored] = unstored
  q = rng.normal(size=(ROWS, chunk, KV_HEADS * GROUP, DIM))
  cache = paged_attention.Cache(
    jnp.array(k, dtype), jnp.array(v, dtype), jnp.array(tables), jnp.int32(1)
  )
  end = np.stack([random_tree(rng, chunk) for _ in range(ROWS)]) if tree else None
  return Case(jnp.array(q, dtype), cache, position, end)


def by_hand(case: Case):
  """Output and logsumexp, each query's keys taken one by one."""
  q, k, v = (np.asarray(x, np.float64) for x in (case.q, case.cache.k, case.cache.v))
  layer, tables, page = int(case.cache.layer), np.asarray(case.cache.tables), k.shape[3]
  out, lse = np.zeros(q.shape), np.full(q.shape[:3], np.inf)
  group = q.shape[2] // k.shape[1]
  for row, i, head in np.ndindex(*q.shape[:3]):
    keys = np.arange(min(case.position[row, i] + 1, tables.shape[1] * page))
    if case.subtree_end is not None:
      start, end = case.position[row, 0], case.subtree_end[row]
      keys = [s for s in keys if s < start or i < end[s - start]]
      keys = np.array(keys, int)
    if not len(keys):
      continue
    at = layer, head // group, tables[row, keys // page], keys % page
    scores = k[at] @ q[row, i, head] * q.shape[3] ** -0.5
    top = scores.max()
    weights = np.exp(scores - top)
    out[row, i, head] = weights @ v[at] / weights.sum()
    lse[row, i, head] = top + np.log(weights.sum())
  return out, lse


@functools.partial(jax.jit, static_argnames='implementation')
def attend(case: Case, implementation: str | None):
  """Output and logsumexp."""
  return paged_attention.attend(*case, logsumexp=True, implementation=implementation)


def check(case: Case, implementation: str, *, atol=3e-6, run=attend):
  """Against `by_hand`: for inputs of 16 bits their exact values."""
  got = run(case, implementation=implementation)
  assert got[0].dtype == case.q.dtype
  for name, a, b in zip(('out', 'lse'), got, by_hand(case), strict=True):
    a = np.asarray(a, np.float64)
    np.testing.assert_allclose(a, b, atol=atol, rtol=0, err_msg=name)
