"""The weights of loss terms: which average each normaliser is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.rl import terms

LENGTHS = st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=5)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from(terms.NORMALISERS))
def test_weights_sum_to_one(lengths, normaliser):
  """Σ weight·|o| is 1, so losses and metrics are means for every batch."""
  weights = terms.weights(lengths, normaliser)
  assert [len(w) for w in weights] == [len(x) for x in lengths]
  total = sum(float(np.dot(w, x)) for w, x in zip(weights, lengths, strict=True))
  assert total == pytest.approx(1.0 if any(map(sum, lengths)) else 0.0)


def test_weights_by_hand():
  """'prompt': M1's 1/Σ|o_i| in each group, averaged over groups; 'token': one Σ;
  'trajectory': GRPO's 1/G Σ_i 1/|o_i|, without empty trajectories."""
  lengths = [[2, 6], [1, 0, 1], []]
  prompt, token, trajectory = (
    np.concatenate(terms.weights(lengths, kind))
    for kind in ('prompt', 'token', 'trajectory')
  )
  np.testing.assert_allclose(prompt, [1 / 16] * 2 + [1 / 4] * 3)
  np.testing.assert_allclose(token, [0.1] * 5)
  np.testing.assert_allclose(trajectory, [1 / 8, 1 / 24, 1 / 4, 0, 1 / 4])
  with pytest.raises(ValueError, match="'prompt', 'token', 'trajectory'"):
    terms.weights(lengths, 'sample')
