"""Rules and specs as data: what lies where, and which mistakes are refused."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from m2jax import config, params, sharding
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import feeds
from m2jax.train import step as train_step
from tests.sharding import small

# Meshes that somebody might choose for 512 chips, and a serving one.
M2_MESHES = [
  dict(fsdp=64, expert=8),
  dict(data=4, fsdp=128, rules='fsdp'),
  dict(fsdp=32, expert=4, tensor=4),
  dict(fsdp=8, context=8, expert=8),
  dict(data=2, fsdp=4, context=4, expert=4, tensor=4),
  dict(expert=64, tensor=8, rules='serve'),
]


def on(**fields) -> sharding.Sharding:
  """A Sharding over devices that are not there."""
  mesh = sharding.MeshConfig(**fields)
  return sharding.Sharding(sharding.abstract_mesh(mesh), sharding.PRESETS[mesh.rules])


def shapes(cfg):
  return jax.eval_shape(
    lambda key: train_step.init_variables(cfg, key), jax.random.key(0)
  )


@pytest.mark.parametrize('modules', [0, 2])
def test_specs_have_the_model_s_structure(modules):
  """Every variable has a spec with as many axes as it has, under the same path."""
  cfg = dataclasses.replace(config.tiny(), num_mtp_modules=modules)
  specs = sharding.param_specs(cfg, sharding.PRESETS['fsdp_ep'])
  like = shapes(cfg)
  assert jax.tree.structure(specs) == jax.tree.structure(like)
  for path, leaf in jax.tree.leaves_with_path(like['params']):
    logical = params.BY_NAME[path[-1].key].split
    stacked = len(path) > 1  # over layers or modules
    assert leaf.ndim == len(logical) + stacked, path


def test_logical_axes_are_the_shapes_axes():
  """A logical axis has one size in all arrays that name it: no table row is transposed.
  The test model has no two sizes alike."""
  cfg = small.config()
  sizes = {
    'vocab': {cfg.vocab_size},
    'heads': {cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim},
    'experts': {cfg.num_experts},
    'expert_hidden': {cfg.expert_dim},
    'model': {cfg.embed_dim, 2 * cfg.embed_dim},
    'expert_model': {cfg.embed_dim},
  }
  for name, param in params.BY_NAME.items():
    for size, logical in zip(param.shape(cfg), param.split, strict=True):
      assert logical is None or size in sizes[logical], name


@pytest.mark.parametrize('fields', M2_MESHES, ids=str)
def test_m2_divides_evenly(fields):
  """The released shape splits without remainder on plausible meshes."""
  where = on(**fields)
  where.check(config.m2())
  specs = sharding.param_specs(config.m2(), where.rules)

  def one(spec, leaf):
    return NamedSharding(where.mesh, spec).shard_shape(leaf.shape)  # raises if uneven

  jax.tree.map(one, specs, shapes(config.m2()))


def test_m2_train_state_fits_512_chips():
  """Weights and both moments in fp32 leave room on a chip of 95 GiB, and nothing large
  lies on every device."""
  where = on(fsdp=64, expert=8)
  cfg = config.m2()
  optimizer = optimizer_lib.make(optimizer_lib.OptimizerConfig())
  state = jax.eval_shape(
    lambda key: train_step.new_state(cfg, optimizer, key), jax.random.key(0)
  )
  specs = train_step.state_specs(cfg, optimizer, where.rules)
  total = 0
  for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True):
    shard = NamedSharding(where.mesh, spec).shard_shape(leaf.shape)
    assert shard != leaf.shape or leaf.size < 1e6, leaf.shape
    total += math.prod(shard) * leaf.dtype.itemsize
  assert total < 10 * 2**30


@pytest.mark.parametrize('name', ['adam', 'muon'])
def test_optimizer_state_lies_with_its_parameters(name):
  """Each moment has its parameter's spec, whichever group of the optimizer holds it;
  a block of the trunk is not taken for one of an MTP module."""
  rules = dataclasses.replace(sharding.PRESETS['fsdp'], vocab=None)
  cfg = small.config(dtype='float32', param_dtype='float32')
  optimizer = optimizer_lib.make(small.optimizer(name))
  specs = train_step.state_specs(cfg, optimizer, rules)
  want = {
    jax.tree_util.keystr(path): spec
    for path, spec in jax.tree.leaves_with_path(specs.variables['params'])
  }
  found = set()
  for path, spec in jax.tree.leaves_with_path(specs.opt_state):
    path = jax.tree_util.keystr(path)
    ends = [name for name in want if path.endswith(name)]
    if ends:
      longest = max(ends, key=len)
      assert spec == want[longest], path
      found.add(longest)
    else:
      assert spec == P(), path
  assert found == set(want)


def test_factored_moments_are_replicated():
  """A state leaf of another shape than its parameter's does not get its spec."""
  params = {'q': jax.ShapeDtypeStruct((256, 512), jnp.float32)}
  state = jax.eval_shape(optax.scale_by_factored_rms().init, params)
  specs = sharding.like_params(state, params, {'q': P('fsdp', 'tensor')})
  assert set(jax.tree.leaves(specs)) == {P()}


def test_a_collision_names_array_and_axes():
  """One mesh axis cannot split two axes of one array."""
  with pytest.raises(
    ValueError, match=r"q \[model, heads\].*'tensor'.*'model'.*'heads'"
  ):
    sharding.Rules(model='tensor', heads='tensor')
  with pytest.raises(ValueError, match="logits .*'data'.*'rows'.*'vocab'"):
    sharding.Rules(rows='data', vocab='data')
  with pytest.raises(ValueError, match='gate'):
    sharding.Rules(experts='expert', expert_model=('fsdp', 'expert'))


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match=r"Rules.heads='model': no mesh axis"):
    sharding.Rules(heads='model')
  with pytest.raises(ValueError, match='Rules.dispatch'):
    sharding.Rules(dispatch='carrier pigeon')
  with pytest.raises(ValueError, match='Rules.exchange_factor=0'):
    sharding.Rules(exchange_factor=0)
  with pytest.raises(ValueError, match="MeshConfig.rules='ep'"):
    sharding.MeshConfig(rules='ep')
  with pytest.raises(ValueError, match='MeshConfig.fsdp=0'):
    sharding.MeshConfig(fsdp=0)
  with pytest.raises(ValueError, match='MeshConfig.tensor=-1: must be -1 for one axis'):
    sharding.MeshConfig(data=-1, tensor=-1)


def test_what_does_not_divide_is_refused_by_name():
  """Before anything is compiled, with the field, the mesh axes and the arrays."""
  with pytest.raises(ValueError, match=r"num_kv_heads=8.* 16 .*'tensor'.*k_norm"):
    on(fsdp=32, tensor=16).check(config.m2())
  with pytest.raises(ValueError, match=r"num_experts=256.* 3 .*'expert'.*gate"):
    on(expert=3).check(config.m2())
  with pytest.raises(ValueError, match='6 rows of a batch do not divide into 4'):
    on(fsdp=2, expert=2).check_batch(6)
  with pytest.raises(ValueError, match='StepConfig.micro_rows=6: 6 rows'):
    feeds.rows(None, train_step.StepConfig(micro_rows=6), on(fsdp=2, expert=2))
  with pytest.raises(ValueError, match='100 tokens of a batch .* into 16 equal'):
    on(context=8).check_batch(4, 100)


def test_experts_need_tokens_of_their_own():
  """Devices with the same tokens would each send them to every expert."""
  rules = sharding.Rules(experts='tensor')
  where = dataclasses.replace(on(tensor=4), rules=rules)
  with pytest.raises(ValueError, match=r"split experts over \('tensor',\)"):
    where.check(small.config())


def test_idle_devices_are_refused():
  """An axis that rules do not use would have its devices repeat the others' work."""
  with pytest.raises(ValueError, match=r"mesh axes \['expert'\]"):
    on(fsdp=2, expert=4, rules='fsdp').check(small.config())
  with pytest.raises(ValueError, match=r"mesh axes \['data'\]"):
    on(data=2, rules='cpu').check(small.config())


def test_too_few_devices():
  with pytest.raises(ValueError, match='needs 4096 devices, there'):
    sharding.make(sharding.MeshConfig(fsdp=4096))


def test_one_device_is_no_mesh():
  """Without a mesh everything is what it was: the same objects come back."""
  where = sharding.make(sharding.MeshConfig())
  assert where is sharding.ONE_DEVICE
  x, params = jnp.ones(3), {'q': np.ones((2, 2))}
  assert where.psum(x, 'rows', 'heads') is x and where.pmean(x, 'heads') is x
  assert where.all_gather(x, 'tokens', axis=0) is x
  assert where.all_to_all(x, 'model', split=0, join=0) is x
  assert where.index('rows') == 0 and where.size('rows') == 1
  assert where.place(params, {'q': P('fsdp')}) is params
  assert where.gather_params(params, 'bfloat16')['q'] is params['q']


def test_an_axis_takes_the_devices_that_are_left():
  """So a config fits any machine, and one more axis needs no second field."""
  mesh = sharding.MeshConfig(fsdp=-1, tensor=2)
  assert mesh.size == 2 and mesh.over(8) == sharding.MeshConfig(fsdp=4, tensor=2)
  assert mesh.over(1) == mesh.over(3) == sharding.MeshConfig(fsdp=1, tensor=2)
  assert sharding.make(mesh, jax.devices()[:6]).mesh.shape['fsdp'] == 3
