"""ConfigDict → dataclasses: every mistake names its place."""

import dataclasses
import importlib
import pathlib
import sys
import types
import typing

import jax
import pytest

from configs import (
  evaluate,
  evolve,
  expand_mtp,
  forge,
  pretrain,
  pretrain_m2,
  serve,
  sft,
)
from experiments import common, fields, served
from m2jax import config as model_config
from m2jax import sharding
from m2jax.evolve.config import EvolveConfig
from m2jax.forge.config import ForgeConfig, RecordedConfig, RolloutConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.optim import optimizer
from m2jax.params import Kind
from m2jax.rl import estimators
from m2jax.rl.learner import LearnerConfig
from m2jax.rl.rewards import RewardConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.train.expand_mtp import ExpandConfig
from m2jax.train.sft import SftConfig
from m2jax.train.stages import PretrainConfig
from m2jax.train.step import StepConfig


def leaves(kind, prefix='', without=()):
  """Dotted names of what a dataclass holds, parts that may be None included."""
  hints = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    if field.name not in without:
      name, kinds = f'{prefix}{field.name}', fields.kinds_of(hints[field.name])
      parts = [k for k in kinds if dataclasses.is_dataclass(k)]
      yield from leaves(parts[0], f'{name}.') if parts else [name]


COMPLETE = {
  'forge': (forge.get_config(), ForgeConfig, ('more_sft',)),
  'forge:more_sft': (forge.get_config('more_sft'), ForgeConfig, ('rl',)),
  'evaluate': (evaluate.get_config(), RolloutConfig, ('model',)),
  'evolve': (evolve.get_config(), EvolveConfig, ()),
  'sft': (sft.get_config().sft, SftConfig, ()),
  'pretrain': (pretrain.get_config().pretrain, PretrainConfig, ()),
  'pretrain_m2': (pretrain_m2.get_config().pretrain, PretrainConfig, ()),
  'expand_mtp': (expand_mtp.get_config().expand, ExpandConfig, ()),
  'serve': (serve.get_config().gateway, GatewayConfig, ()),
  'serve: recorded': (serve.get_config().recorded, RecordedConfig, ()),
}


@pytest.mark.parametrize('name', COMPLETE)
def test_every_field_can_be_set(name):
  """A flag can only set what the config has; fields with a default count."""
  config, kind, without = COMPLETE[name]
  missing = []
  for leaf in leaves(kind, without=without):
    group = config
    for part in leaf.split('.')[:-1]:
      group = group[part]
    if leaf.split('.')[-1] not in group:
      missing.append(leaf)
  assert not missing


def test_completing_changes_nothing():
  """What the config leaves out is the dataclass's own default."""
  assert common.build(ForgeConfig, forge.get_config()).rl.learner == LearnerConfig(
    **{
      **dataclasses.asdict(LearnerConfig()),
      'buckets': LearnerConfig().buckets,
      'critic': LearnerConfig().critic,
      'distillation': LearnerConfig().distillation,
      'estimator': LearnerConfig().estimator,
      'row_tokens': 2048,
      'row_terms': 3072,
      'step': StepConfig(micro_rows=2, detach_mtp=True),
      'reward': RewardConfig(alpha=0.1, gamma=1.0),
    }
  )


def test_no_config_of_m2_divides_advantages(monkeypatch):
  """By the group's deviation: α and β would mean nothing."""
  monkeypatch.setattr(sys, 'prefix', '/usr')  # a sandbox hides an environment in /tmp
  names = [path.stem for path in pathlib.Path(forge.__file__).parent.glob('forge*.py')]
  assert len(names) > 5
  for name in names:
    config = importlib.import_module(f'configs.{name}').get_config()
    learner = common.build(ForgeConfig, config).rl.learner
    assert learner.estimator.kind == 'cispo'
    assert learner.reward_of_estimator.normalise == 'none', name


@pytest.mark.parametrize('name', ['forge', 'forge.py', 'configs/forge.py'])
def test_a_config_is_found_by_name(name, tmp_path, monkeypatch):
  """In any directory; a file of that name comes first, a folder does not."""
  ours = str(pathlib.Path(forge.__file__))
  assert common.config_file(ours) == ours
  monkeypatch.chdir(tmp_path)
  assert common.config_file(name) == ours
  (tmp_path / 'forge').mkdir()
  assert common.config_file('forge') == ours
  own = tmp_path / 'configs' / 'forge.py'
  own.parent.mkdir()
  own.write_text('')
  assert common.config_file('configs/forge.py') == 'configs/forge.py'


@pytest.mark.parametrize(
  'name', ['', 'nosuch', 'forge.txt', '../configs/forge.py', 'a/forge.py', '/forge.py']
)
def test_no_other_path_is_a_name(name, tmp_path, monkeypatch):
  """A mistyped path is an error with the names, and does not run another config."""
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match='no such file.* evaluate, .*forge, '):
    common.config_file(name)


def test_a_default_of_none_has_its_type():
  """`--config.x=0.1` needs to know that x may be a number, though it is None."""
  config = forge.get_config()
  assert config.rl.optimizer.muon.consistent_rms is None
  config.lock().update_from_flattened_dict({'rl.optimizer.muon.consistent_rms': 0.2})
  built = common.build(ForgeConfig, config)
  assert built.rl.optimizer.muon.consistent_rms == 0.2
  with pytest.raises(TypeError):
    config.rl.optimizer.muon.consistent_rms = 'much'


@dataclasses.dataclass(frozen=True)
class Inner:
  size: int

  def __post_init__(self):
    if self.size < 1:
      raise ValueError(f'Inner.size={self.size}: must be positive')


@dataclasses.dataclass(frozen=True)
class Outer:
  inner: Inner
  maybe: Inner | None = None
  names: tuple[str, ...] = ()


def test_build_nested():
  """Nested dataclasses, absent ones and lists arrive as the code below wants them."""
  built = common.build(
    Outer, {'inner': {'size': 1}, 'maybe': {'size': 2}, 'names': ['a']}
  )
  assert built == Outer(Inner(1), Inner(2), ('a',))
  assert common.build(Outer, {'inner': {'size': 1}, 'maybe': None}).maybe is None


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'inner': {'size': 1}, 'other': 1}, 'config: Outer has no field other'),
    ({'inner': {'size': 1, 'x': 2}}, 'config.inner: Inner has no field x; it has size'),
    ({'inner': {}}, 'config.inner: Inner needs size'),
    ({'inner': {'size': 0}}, 'config.inner: Inner.size=0: must be positive'),
    ({'inner': {'size': 'a'}}, 'config.inner: '),
  ],
)
def test_build_refuses(values, message):
  """Unknown, missing and bad fields, each with the dotted path to it."""
  with pytest.raises(common.BadInput, match='^' + message.replace('.', r'\.')):
    common.build(Outer, values)


def test_processes_and_mesh_agree(monkeypatch):
  """Several processes whose mesh leaves out devices would each train a part of a job,
  and fail at the first checkpoint; without a mesh they take all devices."""
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(jax, 'device_count', lambda: 4)
  monkeypatch.setattr(sharding, 'make', lambda mesh: mesh.sizes)
  with pytest.raises(common.BadInput, match='has 2 devices, the 2 processes have 4'):
    common.make_sharding(sharding.MeshConfig(data=2))
  assert common.make_sharding(sharding.MeshConfig())['fsdp'] == 4
  mesh = sharding.MeshConfig(data=2, tensor=2)
  assert common.make_sharding(mesh) == mesh.sizes


@pytest.mark.parametrize('name', ['adam', 'muon', 'nor_muon', 'hyperball', 'sso'])
def test_an_optimizer_is_one_line_away(name):
  """In pre-training, SFT and RL one flag chooses what updates the hidden matrices; the
  settings of the rule are flags too."""
  main, job, tuning = forge.get_config(), pretrain.get_config(), sft.get_config()
  for config, part in ((main, 'sft'), (main, 'rl'), (job, 'pretrain'), (tuning, 'sft')):
    config.lock().update_from_flattened_dict(
      {f'{part}.optimizer.name': name, f'{part}.optimizer.{name}.learning_rate': 0.5}
    )
  built = common.build(ForgeConfig, main)
  for settings in (
    built.sft.optimizer,
    built.rl.optimizer,
    common.build(PretrainConfig, job.pretrain).optimizer,
    common.build(SftConfig, tuning.sft).optimizer,
  ):
    assert optimizer.rule_of(settings, Kind.EXPERT) == name
    assert optimizer.rule_of(settings, Kind.EMBEDDING) == 'adam'
    assert optimizer.rules_in_use(settings)[name].learning_rate == 0.5


def test_an_estimator_is_one_flag_away():
  """With the defaults of its kind, and its own parameters as flags; one of another kind
  is refused, even at its default, and the message has the right ones."""

  def built(**flags):
    config = forge.get_config().lock()
    group = 'rl.learner.estimator'
    config.update_from_flattened_dict({f'{group}.{k}': v for k, v in flags.items()})
    return common.build(ForgeConfig, config).rl.learner.estimator

  for kind in estimators.KINDS:
    assert built(kind=kind) == estimators.make(kind)
  set_ = dict(kind='dapo', clip_low=0.1, normaliser='prompt')
  assert built(**set_) == estimators.make(**set_)
  with pytest.raises(
    common.BadInput,
    match=r"estimator: kind 'grpo' has no field is_weight_max; it has .*clip_low",
  ):
    built(kind='grpo', is_weight_max=5.0)
  with pytest.raises(common.BadInput, match=r"estimator.kind='ppo': no module .*gspo"):
    built(kind='ppo')


def test_a_published_policy_is_served_as_fast_as_a_trained_one():
  """The release's layers are one loop; on a CPU the engine takes them apart."""
  cfg = dataclasses.replace(model_config.tiny(), unroll_layers=False)
  policy = types.SimpleNamespace(model=cfg)
  with served.engine(policy, EngineConfig(slots=2), sharding.ONE_DEVICE) as engine:
    assert engine.keeps_contexts
