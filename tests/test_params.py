"""The table of parameters: kinds, shapes and names that everything else derives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import config, forest, model, params, sharding
from m2jax.checkpoint import huggingface
from m2jax.checkpoint.huggingface import names
from m2jax.kernels import block_fp8
from m2jax.layers import attention, block, head
from m2jax.params import Kind, kind_of, kinds
from m2jax.rollout.engine import forward, modules
from m2jax.rollout.engine import pages as pages_lib
from tests import quick


def test_every_leaf_of_the_model_has_its_kind():
  """A leaf that some rule takes for another one (embed_norm for an embedding) would
  train wrongly: its line is found by its name alone, and has the axes of its shape."""
  cfg = dataclasses.replace(config.tiny(), num_mtp_modules=3, value_head=True)
  tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
  variables = jax.eval_shape(model.M2(cfg).init, jax.random.key(0), tokens)
  leaves = jax.tree_util.tree_leaves_with_path(kinds(variables['params']))
  found = {path[-1].key: kind for path, kind in leaves}
  assert found == {name: param.kind for name, param in params.BY_NAME.items()}
  sizes = params.sizes(cfg)
  for path, leaf in jax.tree_util.tree_leaves_with_path(variables['params']):
    axes = params.BY_NAME[path[-1].key].axes
    assert leaf.shape[-len(axes) :] == tuple(sizes[axis] for axis in axes), path


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


LINES = {  # a scale on attention's output, a matrix beside it, a bias in the experts
  'o_scale': params.Param(('Q',), ('heads',), Kind.NORM, 'ones', 'o_scale.weight'),
  'mix': params.Param(('D', 'D'), (None, None), Kind.MATRIX, 'fan_in', 'mix.weight'),
  'expert_bias': params.Param(
    ('E', 'D'), (None, None), Kind.NORM, 'ones', 'expert_bias.weight'
  ),
}
CFG = dataclasses.replace(
  config.tiny(), num_layers=2, vocab_size=64, num_mtp_modules=1, embed_dim=128
)


@pytest.fixture
def three_more(monkeypatch):
  """Variables with three parameters from outside: a line and a use of each."""
  for name, param in LINES.items():
    monkeypatch.setitem(params.BLOCK, name, param)
  attention_of, experts_of = attention.apply, block._experts

  def attended(x, p, cfg, tables, attend, sharding):
    def scaled(*qkv):
      out, extra = attend(*qkv)
      scale = p['o_scale'].reshape(-1, cfg.head_dim)
      return out * scale.astype(out.dtype), extra

    out, extra = attention_of(x, p, cfg, tables, scaled, sharding)
    return out + block_fp8.dot(x, p['mix'], cfg.matmuls), extra

  def experts(y, ids, weights, p, cfg, sharding):
    bias = jnp.einsum('tk,tkd->td', weights, p['expert_bias'][ids]).astype(y.dtype)
    return experts_of(y, ids, weights, p, cfg, sharding) + bias

  monkeypatch.setattr(attention, 'apply', attended)
  monkeypatch.setattr(block, '_experts', experts)
  names.shapes.cache_clear()
  yield quick.variables(CFG, 0, noise=0.1, bias=0.1)
  names.shapes.cache_clear()


def _score(variables, batch):
  out = model.forward(CFG, variables, batch)
  return jnp.sum(out.logprob) + jnp.sum(out.mtp_logprob), out


def _serve(variables, tokens):
  """Log-probabilities of all words after each token, of the trunk and the module.

  By the engine's pages, in chunks of 8 tokens.
  """
  cache = pages_lib.empty(CFG, 7, 4, modules=1)
  tables, found = np.arange(1, 7, dtype=np.int32).reshape(2, 3), []
  for start in range(0, tokens.shape[1], 8):
    part = tokens[:, start : start + 8]
    counts = np.full(2, part.shape[1], np.int32)
    rows = forward.Rows(part, np.full(2, start, np.int32), counts, tables)
    begin = modules.start(cache, tables, rows.starts)
    hidden, cache = forward.extend(CFG, variables, cache, rows)
    cache = modules.store_states(cache, 0, rows, hidden)
    before = jnp.concatenate([begin.states[0][:, None], hidden[:, :-1]], axis=1)
    cache = modules._store_depth(cache, rows, begin, 1, 0)
    module, cache = modules._module(
      CFG, variables, cache, 1, rows, before, sharding.ONE_DEVICE
    )
    found.append((hidden, module))
  parts = (jnp.concatenate(part, axis=1) for part in zip(*found, strict=True))
  logits = (head.logits(variables['params'], hidden) for hidden in parts)
  return tuple(map(jax.nn.log_softmax, logits))


def test_a_new_parameter_is_one_line(three_more, tmp_path):
  """Learner, engine, sharding, export and FP8 have it without another edit."""
  variables = three_more
  of_module = variables['params']['mtp']['layers']
  assert LINES.keys() <= variables['params']['layers'].keys() & of_module.keys()
  assert kinds(variables['params'])['layers']['mix'] == Kind.MATRIX

  tokens = np.random.default_rng(0).integers(64, size=(2, 12), dtype=np.int32)
  batch = forest.causal(tokens)
  grad, out = jax.jit(jax.grad(_score, has_aux=True))(variables, batch)
  for part in grad['params']['layers'], grad['params']['mtp']['layers']:
    assert all(np.abs(part[name]).sum() > 0 for name in LINES)

  trunk, module = jax.jit(_serve)(variables, tokens)
  for got, want, first in (trunk, out.logprob, 1), (module, out.mtp_logprob[0], 2):
    got = np.take_along_axis(np.asarray(got)[:, :-1], tokens[:, 1:, None], axis=2)
    np.testing.assert_allclose(got[:, first - 1 :, 0], want[:, first:], atol=2e-5)

  mesh = sharding.MeshConfig(tensor=2, rules='serve')
  on_mesh = sharding.Sharding(sharding.abstract_mesh(mesh), sharding.rules_of(mesh))
  specs = sharding.param_specs(CFG, on_mesh.rules)
  assert jax.tree.structure(specs) == jax.tree.structure(variables)
  assert 'tensor' in specs['params']['layers']['o_scale']
  jax.eval_shape(lambda v: model.forward(CFG, v, batch, sharding=on_mesh), variables)

  huggingface.save(tmp_path / 'release', CFG, variables)
  _, loaded = huggingface.load(tmp_path / 'release')
  for name in LINES:
    got = loaded['params']['mtp']['layers'][name]
    np.testing.assert_array_equal(got, of_module[name])

  quantized = block_fp8.quantize_variables(variables)['params']['layers']
  blocks = {name for name in LINES if isinstance(quantized[name], block_fp8.Blocks)}
  assert blocks == {'mix'}
