"""Names of cached pages that do not depend on where they are: a chain of hashes.

The digest of a page covers its tokens and all before them, so equal digests mean equal
prefixes; the policy version is not part of it. A router compares prompts with the pages
of engines in other processes by digests alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

ROOT = b''
DIGEST_BYTES = 16  # two different prefixes are never expected to have the same


def link(parent: bytes, page: bytes) -> bytes:
  """The digest of a page.

  Args:
    parent: digest of the page before it; ROOT of the first.
    page: its token ids, int32.
  """
  return hashlib.blake2b(parent + page, digest_size=DIGEST_BYTES).digest()


def chain(
  tokens: np.ndarray, page_tokens: int, known: Sequence[bytes] = ()
) -> list[bytes]:
  """Digests of the full pages of tokens [n].

  Args:
    known: digests of the first pages, if they have been computed before.
  """
  tokens = np.ascontiguousarray(tokens, np.int32)
  digests = list(known)
  parent = digests[-1] if digests else ROOT
  for start in range(
    len(digests) * page_tokens, len(tokens) - page_tokens + 1, page_tokens
  ):
    parent = link(parent, tokens[start : start + page_tokens].tobytes())
    digests.append(parent)
  return digests
