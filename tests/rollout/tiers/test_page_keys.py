"""Keys of pages: equal for equal weights and tokens, and for nothing else."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rollout.tiers import page_keys

TOKENS = st.lists(st.binary(min_size=2, max_size=2), max_size=4)


@given(TOKENS, TOKENS, st.sampled_from(['a', 'b']), st.sampled_from(['a', 'b']))
def test_keys_are_those_of_the_whole_prefix(first, second, model, other):
  a = page_keys.chain(page_keys.root(model), first)
  b = page_keys.chain(page_keys.root(other), second)
  for i, (x, y) in enumerate(zip(a, b, strict=False)):
    equal = model == other and first[: i + 1] == second[: i + 1]
    assert (x == y) == equal
  assert page_keys.chain(page_keys.root(model), first + second)[: len(a)] == a


def test_parts_of_a_root_do_not_run_together():
  assert page_keys.root('ab', 'c') != page_keys.root('a', 'bc')


def test_any_bit_of_the_weights_counts():
  """Also one of a bfloat16, signs of zeros, places, names and dtypes."""
  weights = {
    'a': np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 4),
    'b': (np.zeros(5, np.float32), np.ones(2, np.float32)),
  }
  want = page_keys.fingerprint(weights)
  assert page_keys.fingerprint({k: weights[k] for k in 'ba'}) == want
  assert page_keys.fingerprint(dict(weights, a=jax.device_put(weights['a']))) == want
  a = weights['a']
  bits = a.copy()
  bits.view(np.uint16)[1, 2] += 1
  others = [
    dict(weights, a=bits),
    dict(weights, a=a[::-1]),
    dict(weights, a=a.reshape(4, 3)),
    dict(weights, a=a.astype(np.float32)),
    dict(weights, b=(-weights['b'][0], weights['b'][1])),
    dict(a=a, c=weights['b']),
  ]
  found = [page_keys.fingerprint(other) for other in others]
  assert want not in found and len(set(found)) == len(found)
