"""The stable order of assignments by expert, by counting instead of comparing.

An assignment's place is the number of assignments to lower experts, plus those of
earlier tokens to its own expert, plus earlier choices of its own token: three sums over
one-hots, which are matmuls and reductions. The cost is T·k·E; two stable sorts would do
the same, but are slow to compile and to run on TPU.

Axes: T tokens, k experts of a token, A = T·k assignments, E experts, B blocks of c
tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from m2jax import platforms
from m2jax.axes import Array, Int, Int32

NAME = 'by_expert'  # for policies of `jax.checkpoint`: small, and slow to recompute
_BLOCK = 128  # tokens whose running count is one matmul


def order(
  ids: Int[Array, 'T k'], num_experts: int
) -> tuple[Int32[Array, 'A'], Int32[Array, 'A'], Int32[Array, 'E']]:
  """ids in [0, E] → order, place, sizes.

  `order` lists the assignments by expert, those of one expert in their own order, those
  of id E (an expert of another device) last; `place` is its inverse. `sizes` is the
  number of assignments of each expert, without those of id E.

  Raises:
    ValueError: (E + 1)·A is 2**32 or more; more rows than fit any device's memory.
  """
  sizes = num_experts + 1
  if sizes * ids.size >= 2**32:
    raise ValueError(
      f'{ids.size} assignments to {num_experts} experts: too many to sort'
    )
  chosen = ids[..., None] == jnp.arange(sizes)  # [T, k, E + 1]
  count = jnp.sum(chosen, axis=1, dtype=jnp.int32)
  blocks = jnp.pad(count, [(0, -len(ids) % _BLOCK), (0, 0)])
  blocks = blocks.reshape(-1, _BLOCK, sizes)
  # small whole numbers: exact in bf16, and their sums in fp32
  earlier = jnp.tril(jnp.ones((_BLOCK, _BLOCK), jnp.bfloat16), -1)
  within = jnp.einsum(
    'ij,bje->bie',
    earlier,
    blocks.astype(jnp.bfloat16),
    preferred_element_type=jnp.float32,
  )
  in_block = jnp.sum(blocks, axis=1, dtype=jnp.int32)
  totals = jnp.sum(in_block, axis=0, dtype=jnp.int32)
  start = _before(in_block) + _before(totals)
  before = (within.astype(jnp.int32) + start[:, None]).reshape(-1, sizes)[: len(ids)]
  same = ids[:, :, None] == ids[:, None, :]  # an id of E may repeat within a token
  repeats = jnp.sum(jnp.tril(same, -1), axis=-1, dtype=jnp.int32)
  place = jnp.sum(jnp.where(chosen, before[:, None], 0), axis=-1, dtype=jnp.int32)
  place = (place + repeats).reshape(-1)
  order = platforms.dependent(ids.reshape(-1), place, tpu=_sorted, default=_scattered)
  return checkpoint_name((order, place, totals[:num_experts]), NAME)


def _before(x):
  """Sums of the preceding elements along the first axis."""
  return jnp.cumsum(x, axis=0, dtype=x.dtype) - x


def _scattered(ids, place):
  del ids
  numbers = jnp.arange(len(place), dtype=jnp.int32)
  return jnp.zeros_like(place).at[place].set(numbers, unique_indices=True)


def _sorted(ids, place):
  """A TPU sorts in parallel, but scatters serially; a single key compiles fastest."""
  del place
  count = jnp.uint32(len(ids))
  key = ids.astype(jnp.uint32) * count + jnp.arange(len(ids), dtype=jnp.uint32)
  return (lax.sort(key, is_stable=False) % count).astype(jnp.int32)
