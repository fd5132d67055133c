"""Encodes a page as bytes for a store.

  magic (8 bytes) | BLAKE2b of the arrays, keyed with the page's key (32) | the arrays

The reader's own layout, which is part of the key, determines shapes, dtypes and order
of the arrays; the value does not.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np

from m2jax.rollout.tiers.page_layout import Layout, Page

MAGIC = b'm2jaxkv1'
_CHECKSUM_BYTES = 32
_HEADER_BYTES = len(MAGIC) + _CHECKSUM_BYTES


class CorruptPage(ValueError):
  """The value is not the page of its key."""


def value_bytes(layout: Layout) -> int:
  """Size of every value of a layout."""
  return _HEADER_BYTES + layout.page_bytes


def encode(key: bytes, page: Page) -> bytes:
  payload = b''.join(array.tobytes() for array in page)
  return MAGIC + _checksum(key, payload) + payload


def decode(key: bytes, value: bytes, layout: Layout) -> Page:
  """The inverse of `encode`; arrays are views of the value.

  Raises:
    CorruptPage: the value was cut, changed, or written for another key; or it has a
      number that is not finite, which no page that is written has.
  """
  if len(value) != value_bytes(layout) or value[: len(MAGIC)] != MAGIC:
    raise CorruptPage('not a page of this layout')
  payload = memoryview(value)[_HEADER_BYTES:]
  want = value[len(MAGIC) : _HEADER_BYTES]
  if not hmac.compare_digest(want, _checksum(key, payload)):
    raise CorruptPage('checksum')
  arrays, at = [], 0
  for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
    count = int(np.prod(shape))
    arrays.append(np.frombuffer(payload, dtype, count, at).reshape(shape))
    at += count * dtype.itemsize
  if not layout.finite(page := tuple(arrays)):
    raise CorruptPage('not finite')
  return page


def _checksum(key: bytes, payload) -> bytes:
  return hashlib.blake2b(payload, digest_size=_CHECKSUM_BYTES, key=key).digest()
