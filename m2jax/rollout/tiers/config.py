"""Settings of the pool of pages outside the engine's memory."""

from __future__ import annotations

import dataclasses
import functools
import re

from m2jax.checks import require


@dataclasses.dataclass(frozen=True)
class KvPoolConfig:
  """Where pages are stored, and how much.

  Attributes:
    url: URL of a tensorstore key-value store: memory://name/ (of this process),
      file:///directory/, gs://bucket/prefix/. Engines with the same model, weights and
      sizes share what they find there. '': no pool.
    bytes: limit on the size of all pages there. Every engine that writes keeps to it;
      see `usage`.
    queue_pages: maximum pages that wait to be written; others are dropped and counted.
    wait_s: how long a request waits at most for pages that are being read, before they
      are computed instead.
    timeout_s: timeout of one operation of the store.
  """

  url: str = ''
  bytes: int = 1 << 30
  queue_pages: int = 256
  wait_s: float = 1.0
  timeout_s: float = 30.0

  def __post_init__(self):
    check = functools.partial(require, self)
    known = not self.url or re.match(r'[a-z0-9+.-]+://', self.url)
    check(bool(known), 'url', "'' or a URL: memory://, file:///directory/ or gs://")
    for field in ('bytes', 'queue_pages', 'timeout_s'):
      check(getattr(self, field) > 0, field, 'positive')
    check(self.wait_s >= 0, 'wait_s', 'at least 0')
