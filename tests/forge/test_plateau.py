"""When RL stops because its development curve is flat."""

from hypothesis import given
from hypothesis import strategies as st

from m2jax.forge.evaluation import Plateau

VALUES = st.lists(st.floats(0, 1), max_size=12)


@given(VALUES, st.integers(1, 4))
def test_a_new_best_is_never_flat(values, patience):
  """Training continues while the last evaluation is the best."""
  assert not Plateau([*values, 1.5]).flat(patience)


@given(VALUES, st.integers(1, 4))
def test_flat_after_patience_values_without_a_best(values, patience):
  """Exactly `patience` evaluations no better than the best before them are enough."""
  curve = Plateau([*values, 2.0])
  for _ in range(patience):
    assert not curve.flat(patience)
    curve.add(0.5)
  assert curve.flat(patience)


def test_no_patience_is_no_limit():
  assert not Plateau([0.5] * 20).flat(0)
