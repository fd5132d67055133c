"""Model presets have the published counts; every pre-training config is complete."""

import dataclasses

import jax
import pytest

from configs import ablations, expand_mtp, pretrain, pretrain_ablation, pretrain_m2
from experiments import common
from experiments import expand_mtp as expand_job
from experiments import pretrain as pretrain_job
from m2jax import config
from m2jax.sharding import MeshConfig
from m2jax.train import step as train_step
from m2jax.train.stages import settings


def counts(model):
  """(all parameters, those active for a token without embedding and head)."""
  model = dataclasses.replace(model, num_mtp_modules=0)
  make = lambda: train_step.init_variables(model, jax.random.key(0))['params']
  params = jax.eval_shape(make)
  total = sum(leaf.size for leaf in jax.tree.leaves(params))
  layers = params['layers']
  experts = sum(layers[name].size for name in ('gate', 'up', 'down'))
  idle = experts * (1 - model.experts_per_token / model.num_experts)
  return total, total - params['embed'].size - params['head'].size - idle


def test_ablation_counts():
  """17.8B in all, 2B active, 1/16 of the experts active (facts/m2-and-forge.md §1.5);
  coarse and fine differ by their routers alone. The counting is that of M2's 9.8B."""
  total, active = counts(config.m2())
  assert (round(total / 1e9, 1), round(active / 1e9, 1)) == (228.7, 9.8)
  fine, coarse = config.ablation(), config.ablation(fine_grained=False)
  for model in (fine, coarse):
    total, active = counts(model)
    assert round(total / 1e9, 1) == 17.8
    assert round(active / 1e9, 1) == 2.0
    assert model.num_experts == 16 * model.experts_per_token
  assert (fine.num_experts, coarse.num_experts) == (128, 32)
  routers = fine.num_layers * fine.embed_dim * (128 - 32)
  assert counts(fine)[0] - counts(coarse)[0] == routers


@pytest.mark.parametrize('module', [ablations, pretrain_ablation])
def test_ablations_change_one_thing(module):
  """Every variant has the parameters and active parameters of the one it is compared
  with, but for the routers of coarse experts, and differs from it in what its name
  says."""
  base = module.get_config('m2' if module is ablations else 'fine')
  fields_of_base = base.model.to_dict()
  want = counts(config.ModelConfig(**fields_of_base))
  for variant in set(module.VARIANTS) - {'coarse_mtp'}:
    other = module.get_config(variant)
    model = config.ModelConfig(**other.model.to_dict())
    routers = base.model.num_experts - model.num_experts
    routers *= model.num_layers * model.embed_dim
    assert counts(model) == (want[0] - routers, want[1] - routers)
    fields = dataclasses.asdict(model).items()
    changed = {name for name, value in fields if fields_of_base[name] != value}
    coarse = {'num_experts', 'experts_per_token', 'expert_dim'}
    assert changed == {
      'hybrid': {'window', 'full_attention_every', 'sinks'},
      'coarse': coarse,
      'softmax': {'router_scores'},
      'softmax_no_bias': {'router_scores'},
    }.get(variant, set())
    assert (other.pretrain.step.bias_update_rate == 0) == ('no_bias' in variant)


JOBS = [
  *((pretrain, variant) for variant in ('tiny', 'smoke', 'stages')),
  *((pretrain_ablation, variant) for variant in pretrain_ablation.VARIANTS),
  *((ablations, variant) for variant in ablations.VARIANTS),
  (pretrain_m2, ''),
]


@pytest.mark.parametrize(('module', 'variant'), JOBS)
def test_pretraining_configs_build(module, variant):
  """Every field is known and in range, each stage's context fits the model, and the
  budget reaches the end of the last stage."""
  built = common.build(pretrain_job.Config, module.get_config(variant))
  stages, loop = built.pretrain.stages, built.pretrain.loop
  assert max(stage.context for stage in stages) <= built.model.max_positions
  if stages[-1].tokens:
    assert loop.steps == sum(number for number, _ in built.pretrain.segments)
  mesh = module.get_config(variant).mesh  # --config.mesh.* can set what is there
  assert set(mesh) == {field.name for field in dataclasses.fields(MeshConfig)}
  for name, domain in built.text.domains.items():
    common.build(pretrain_job.DomainConfig, domain, name)


def test_m2_config_is_the_report():
  """19.9T and 9.3T tokens, 8K to 32K to 192K, MTP 0.3 to 0.1, one module."""
  built = common.build(pretrain_job.Config, pretrain_m2.get_config())
  job = built.pretrain
  assert built.model == config.m2() and built.model.num_mtp_modules == 1
  tokens = sum(stage.tokens for stage in job.stages)
  assert tokens == job.phases.tokens == 29_200 * 10**9
  assert [stage.context for stage in job.stages] == [8 * 1024, 32 * 1024, 192 * 1024]
  weights = [settings(job, t * 10**9).mtp_weight for t in (0, 19_899, 19_900, 29_000)]
  assert weights == [0.3, 0.3, 0.1, 0.1]


@pytest.mark.parametrize('variant', ['', 'smoke'])
def test_expansion_config_builds(variant):
  """One module to three; both parts have a budget."""
  built = common.build(expand_job.Config, expand_mtp.get_config(variant))
  assert built.expand.modules == 3
  assert built.expand.frozen.loop.steps >= 2 * built.expand.check_every


@pytest.mark.parametrize(
  'module', [ablations, pretrain, pretrain_ablation, pretrain_m2, expand_mtp]
)
def test_unknown_variants_are_refused(module):
  """A mistyped variant must not run another experiment."""
  with pytest.raises(ValueError, match="unknown variant 'nosuch'"):
    module.get_config('nosuch')
