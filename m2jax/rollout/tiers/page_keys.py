"""Keys of pages: hash chains over what determines the keys and values of their tokens.

  key[-1] = hash(format, model, weights, …)      the root
  key[i]  = hash(key[i-1], tokens of page i)

Equal keys therefore mean equal weights and equal tokens from the first position on. The
hash is BLAKE2b (RFC 7693) with 32 bytes.

Axes: n tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KEY_BYTES = 32


def root(*parts: str | bytes) -> bytes:
  """The key before the first page."""
  digest = hashlib.blake2b(digest_size=KEY_BYTES)
  for part in parts:
    part = part.encode() if isinstance(part, str) else part
    digest.update(len(part).to_bytes(8, 'little') + part)
  return digest.digest()


def extend(key: bytes, page: bytes) -> bytes:
  """The key of the page after `key`, whose tokens as int32 bytes are `page`."""
  return hashlib.blake2b(key + page, digest_size=KEY_BYTES).digest()


def chain(key: bytes, pages: Iterable[bytes]) -> list[bytes]:
  """The key of each page that follows `key`."""
  keys = []
  for page in pages:
    keys.append(key := extend(key, page))
  return keys


def fingerprint(variables: Any) -> bytes:
  """A hash of all bits of the weights, independent of the mesh that they are on.

  Reads them once, on the devices where they are, and returns when this is done. Names
  of parameters, shapes and dtypes count. It separates the weights of different runs and
  steps; it is no protection against weights that were made to collide.
  """
  leaves = jax.tree_util.tree_leaves_with_path(variables)
  sums = jax.device_get([_sums(jnp.asarray(leaf)) for _, leaf in leaves])
  parts = []
  for (path, leaf), values in zip(leaves, sums, strict=True):
    parts.append(f'{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}')
    parts.append(np.asarray(values).tobytes())
  return root(*parts)


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
  """[2] uint32: sums of a mixture of each element's bits and index.

  Sums of integers do not depend on their order. The mixture is the finalizer of
  MurmurHash3.
  """
  words = jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
  if x.dtype.itemsize == 8:
    words = (words & 0xFFFFFFFF) ^ ((words >> 32) * 0x9E3779B1)
  words, index = words.astype(jnp.uint32), jnp.zeros((), jnp.uint32)
  for axis, size in enumerate(x.shape):
    index = index * np.uint32(size)
    index = index + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)

  def mixed(seed: int):
    h = words ^ _mix(index * np.uint32(0x9E3779B1) + np.uint32(seed))
    return jnp.sum(_mix(h), dtype=jnp.uint32)

  return jnp.stack([mixed(0), mixed(0x85EBCA77)])


def _mix(h):
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
