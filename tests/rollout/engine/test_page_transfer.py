"""Pages read from one engine and written to another continue a sequence there."""

from __future__ import annotations

import jax
import numpy as np

from m2jax.rollout.engine.pages import UNUSED
from tests.rollout.conftest import RECORDING


def _filled(engine, weights, tokens, pages):
  state = engine.init_decode_state()
  chunk = np.zeros((4, 8), np.int32)
  chunk[0] = tokens
  table = np.full((4, 12), UNUSED, np.int32)
  table[0, :2] = pages
  zeros, counts = np.zeros(4, np.int32), np.array([8, 0, 0, 0], np.int32)
  return engine.prefill_rows(weights, state, chunk, zeros, counts, table)


def test_pages_arrive_as_they_were(recording, variables):
  weights = recording.load_params(variables)
  tokens = np.arange(8, dtype=np.int32)
  source = _filled(recording, weights, tokens, [3, 7])
  group = np.int32(0)
  there = np.array([3, 7, UNUSED], np.int32)
  read = jax.device_get(recording.read_pages(source, group, there))
  assert read.tokens[:2].ravel().tolist() == tokens.tolist()
  assert read.k.shape[2:4] == (3, RECORDING.page_tokens)
  here = np.array([9, 1, UNUSED], np.int32)
  target = recording.write_pages(
    recording.init_decode_state(), group, here, jax.device_put(read)
  )
  assert np.any(np.asarray(source.pages.k[:, :, 3]))
  a, b = jax.device_get((source.pages, target.pages))
  for page, other in zip(there[:2], here[:2], strict=True):
    np.testing.assert_array_equal(a.k[:, :, page], b.k[:, :, other])
    np.testing.assert_array_equal(a.v[:, :, page], b.v[:, :, other])
    np.testing.assert_array_equal(a.experts[:, page], b.experts[:, other])
  unwritten = [p for p in range(b.k.shape[2]) if p not in here]
  assert not np.any(b.k[:, :, unwritten])
