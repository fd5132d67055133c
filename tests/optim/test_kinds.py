"""Every parameter has a kind, and a new one cannot slip in without."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from m2jax import config, model
from m2jax.optim import Kind, classify, kind_of

WANT = {
  'embed': Kind.EMBEDDING,
  'head': Kind.HEAD,
  'final_norm': Kind.NORM,
  'attn_norm': Kind.NORM,
  'moe_norm': Kind.NORM,
  'q_norm': Kind.NORM,
  'k_norm': Kind.NORM,
  'hidden_norm': Kind.NORM,
  'embed_norm': Kind.NORM,
  'q': Kind.MATRIX,
  'k': Kind.MATRIX,
  'v': Kind.MATRIX,
  'o': Kind.MATRIX,
  'proj': Kind.MATRIX,
  'router': Kind.ROUTER,
  'gate': Kind.EXPERT,
  'up': Kind.EXPERT,
  'down': Kind.EXPERT,
}


def test_every_leaf_of_the_model_has_its_kind():
  """The table above is written by hand from the model's description: a leaf that some
  rule takes for another kind (embed_norm for an embedding) would train wrongly."""
  cfg = dataclasses.replace(config.tiny(), num_mtp_modules=3)
  tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
  variables = jax.eval_shape(model.M2(cfg).init, jax.random.key(0), tokens)
  found = jax.tree_util.tree_leaves_with_path(classify(variables['params']))
  names = set()
  for path, kind in found:
    name = path[-1].key
    names.add(name)
    assert kind == WANT[name], path
  assert names == set(WANT)


def test_unknown_and_misshapen_leaves_raise():
  """A new parameter must be given a kind before it can be trained."""
  with pytest.raises(ValueError, match=r'layers/gizmo is of no known kind.*RULES'):
    classify({'layers': {'gizmo': jnp.zeros((2, 3))}})
  # An expert weight without its expert axis would be stacked layers to Muon.
  with pytest.raises(ValueError, match='layers/up has 2 axes; as expert .* at least 3'):
    classify({'layers': {'up': jnp.zeros((2, 3))}})


def test_names_match_in_full():
  """'embed' must not swallow 'embed_norm', nor 'q' 'q_norm' or 'qx'."""
  assert kind_of('mtp/embed_norm', 2) == Kind.NORM
  assert kind_of('router_bias', 2) == Kind.BIAS
  with pytest.raises(ValueError, match='qx'):
    kind_of('qx', 2)
