"""The order of assignments by expert, against numpy's stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.moe import by_expert as module

ORDER = jax.jit(module.order, static_argnums=1)
SORTED = jax.jit(module._sorted)


@given(
  shape=st.sampled_from([(1, 1, 1), (128, 3, 5), (300, 4, 20)]),
  seed=st.integers(0, 999),
)
def test_equals_a_stable_sort(shape, seed):
  """Any ids, repeated within a token, absent, or those of experts elsewhere; both ways
  to invert, of which the one for TPUs would not be run here otherwise."""
  tokens, top_k, experts = shape
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, experts + 1, (tokens, top_k)).astype(np.int32)
  order, place, sizes = jax.device_get(ORDER(ids, experts))
  want = np.argsort(ids.reshape(-1), kind='stable')
  np.testing.assert_array_equal(order, want)
  np.testing.assert_array_equal(place, np.argsort(want))
  np.testing.assert_array_equal(
    sizes, np.bincount(ids.reshape(-1), minlength=experts + 1)[:experts]
  )
  np.testing.assert_array_equal(SORTED(ids.reshape(-1), place), want)


def test_ids_beyond_what_a_key_holds_are_refused():
  """A key that wrapped would send tokens to the wrong expert."""
  with pytest.raises(ValueError, match='too many to sort'):
    jax.eval_shape(
      lambda ids: module.order(ids, 256),
      jax.ShapeDtypeStruct((2**22, 8), jnp.int32),
    )
