"""The table of parameters: kinds, shapes and names that everything else derives."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from m2jax import config, model, params, sharding
from m2jax.checkpoint.huggingface import names
from m2jax.params import Kind, kind_of, kinds

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
  leaves = jax.tree_util.tree_leaves_with_path(kinds(variables['params']))
  found = set()
  for path, kind in leaves:
    name = path[-1].key
    found.add(name)
    assert kind == WANT[name], path
  assert found == set(WANT)


def test_unknown_and_misshapen_leaves_raise():
  """A new parameter must be given a kind before it can be trained."""
  with pytest.raises(ValueError, match=r'unknown parameter layers/gizmo.*m2jax.params'):
    kinds({'layers': {'gizmo': jnp.zeros((2, 3))}})
  # An expert weight without its expert axis would be stacked layers to Muon.
  with pytest.raises(ValueError, match='layers/up has 2 axes; as expert .* at least 3'):
    kinds({'layers': {'up': jnp.zeros((2, 3))}})


def test_names_match_in_full():
  """'embed' must not swallow 'embed_norm', nor 'q' 'q_norm' or 'qx'."""
  assert kind_of('mtp/embed_norm', 2) == Kind.NORM
  with pytest.raises(ValueError, match='qx'):
    kind_of('qx', 2)


def test_a_new_parameter_is_one_line(monkeypatch):
  """Its line in the table gives it values, a spec, a kind and a released name."""
  gizmo = params.Param(
    ('D', 'KV'), ('model', 'heads'), Kind.MATRIX, 'residual', 'gizmo.weight'
  )
  monkeypatch.setitem(params.BLOCK, 'gizmo', gizmo)
  monkeypatch.setattr(params, 'BY_NAME', {**params.BY_NAME, 'gizmo': gizmo})
  names.shapes.cache_clear()
  cfg = dataclasses.replace(config.tiny(), num_mtp_modules=1)
  kv = cfg.num_kv_heads * cfg.head_dim
  try:
    init = jax.jit(model.M2(cfg).init)
    variables = init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    array = variables['params']['mtp']['layers']['gizmo']
    assert array.shape == (1, cfg.embed_dim, kv)
    assert kinds(variables['params'])['layers']['gizmo'] == Kind.MATRIX
    specs = sharding.param_specs(cfg, sharding.PRESETS['fsdp_ep'])
    assert jax.tree.structure(specs) == jax.tree.structure(variables)
    assert [t.name for t in names.tensors(cfg) if 'gizmo' in t.name] == [
      *(f'model.layers.{layer}.gizmo.weight' for layer in range(cfg.num_layers)),
      'model.mtp_layers.0.gizmo.weight',
    ]
  finally:
    names.shapes.cache_clear()
