"""Pre-training's stages and phases: what changes with the tokens; exact resumption."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.checkpoint.manager import CheckpointManager
from m2jax.data.stream import StateMismatch
from m2jax.observe import metrics as metrics_lib
from m2jax.optim import AdamConfig, OptimizerConfig, ScheduleConfig
from m2jax.sharding import MeshConfig
from m2jax.train import loop, placement, pretrain, stages
from m2jax.train.stages import PhasesConfig, PretrainConfig, Settings, Stage
from m2jax.train.step import StepConfig
from tests import quick
from tests.train import test_step

CFG = dataclasses.replace(test_step.CFG, dtype='float32', param_dtype='float32')
PHASES = PhasesConfig(
  tokens=384,
  warmup_tokens=96,
  decay_tokens=192,
  final_fraction=0.1,
  decay_mtp_weight=0.1,
  bias_updates_until=0.5,  # with the decay: one program less
)


def config(**more) -> PretrainConfig:
  """Three batches of 4 rows of 8, then five of 2 rows of 32: 96 and 320 tokens."""
  fields = {
    'stages': ((8, 4, 96), (32, 2, 320)),
    'phases': PHASES,
    'held_out_batches': 2,
    'loop': loop.LoopConfig(steps=100, checkpoint_every=2, log_every=1),
    'step': StepConfig(micro_rows=2, mtp_weight=0.3, bias_update_rate=1e-2),
    'optimizer': OptimizerConfig(adam=AdamConfig(learning_rate=1e-2)),
  }
  return PretrainConfig(**{**fields, **more})


def documents(seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(1, CFG.vocab_size, rng.integers(3, 40)) for _ in range(9)]


def same(a, b):
  """Whether two `Pieces` are the same batch."""
  alike = all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))
  return alike and a[1:] == b[1:]


@given(st.integers(0, 12), st.booleans())
def test_staged_rows_resume_at_the_exact_next_batch(consumed, one_source):
  """Through JSON, at every batch, also where one stage ends: batches, their stage and
  the tokens before them are those of the run that was not stopped."""
  sources = [documents()] * 2 if one_source else [documents(0), documents(1)]
  first = stages.StagedRows(config(), sources, seed=1)
  taken = list(itertools.islice(first, consumed))
  assert len(taken) == min(consumed, 8)
  state = json.loads(json.dumps(first.state()))
  rest = list(first)
  again = list(stages.StagedRows(config(), sources, seed=1, state=state))
  assert len(again) == len(rest) == 8 - len(taken)
  assert all(map(same, rest, again))
  consumed = [batch.consumed for batch in taken + rest]
  assert consumed == [0, 32, 64, 96, 160, 224, 288, 352]
  contexts = [batch.stage.context for batch in taken + rest]
  assert contexts == [8] * 3 + [32] * 5


def test_stages_share_or_begin_a_source():
  """With one source the second stage continues with each stream's next token; with a
  source of its own it begins there."""
  shared, other = documents(), documents(1)
  batches = list(stages.StagedRows(config(), [shared, shared], seed=1))
  longer = config(stages=((8, 4, 96 + 320),), streams=2)
  plain = list(stages.StagedRows(longer, [shared], seed=1))

  def streams(batches):  # two streams: each fills half of every batch
    halves = [np.concatenate(b.arrays).reshape(2, -1) for b in batches]
    return np.concatenate(halves, axis=1)

  np.testing.assert_array_equal(streams(batches), streams(plain))
  batches = list(stages.StagedRows(config(), [shared, other], seed=1))
  alone = list(stages.StagedRows(config(stages=((32, 2, 320),)), [other], seed=1))
  np.testing.assert_array_equal(streams(batches[3:]), streams(alone))
  with pytest.raises(ValueError, match='1 sources for 2 stages'):
    stages.StagedRows(config(), [shared], seed=1)
  with pytest.raises(StateMismatch, match='another version'):
    stages.StagedRows(config(), [shared, other], seed=1, state={'position': 3})


def test_the_last_stage_may_have_no_end():
  """Then the loop's budget ends the run."""
  endless = config(stages=((8, 4, 32), (32, 2, 0)))
  rows = stages.StagedRows(endless, [documents()] * 2, seed=1)
  contexts = [batch.stage.context for batch in itertools.islice(rows, 40)]
  assert contexts == [8] + [32] * 39


def test_settings_change_with_the_tokens():
  """MTP's weight with the decay phase, the bias's rate at its fraction: each from the
  first batch that begins there."""
  longer = config(phases=dataclasses.replace(PHASES, bias_updates_until=0.75))
  found = [stages.settings(longer, tokens) for tokens in (0, 191, 192, 287, 288)]
  early, late = Settings(0.3, 1e-2), Settings(0.1, 1e-2)
  assert found == [early, early, late, late, Settings(0.1, 0.0)]
  endless = config(phases=PhasesConfig())
  assert stages.settings(endless, 10**15) == early


def test_m2_phases_by_hand():
  """The report's phases at M2's batch: 12,582,912 tokens in every stage."""
  size = 8192 * 1536
  constant, decay = 19_900_000_000_000, 9_300_000_000_000
  m2 = config(
    stages=((8192, 1536, 26_200_000_000_000), (32768, 384, 0)),
    phases=PhasesConfig(tokens=constant + decay, decay_tokens=decay),
  )
  schedule = stages.schedule(m2)
  assert schedule.total_steps == -(-(constant + decay) // size)
  first = -(-constant // size)
  assert schedule.total_steps - schedule.decay_steps == first
  assert stages.settings(m2, m2.clock.tokens(first - 1)).mtp_weight == 0.3
  assert stages.settings(m2, m2.clock.tokens(first)).mtp_weight == 0.1


class Killed(BaseException):
  """Stands for SIGKILL."""


class Dying(list):
  """Documents that can be read so often, then the process dies."""

  left = 10**9

  def __getitem__(self, index):
    self.left -= 1
    if self.left < 0:
      raise Killed
    return super().__getitem__(index)


def fit(workdir, sources, cfg=None, variables=None, **more):
  with (
    CheckpointManager(workdir / 'pretrain', keep=None) as manager,
    metrics_lib.MetricsWriter(workdir, use_tensorboard=False) as metrics,
  ):
    return pretrain.fit(
      cfg or config(),
      CFG,
      sources,
      loop.Run('pretrain', manager, metrics),
      seed=1,
      variables=variables or quick.variables(CFG, 0),
      **more,
    )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """(workdir, state) of the run that was never stopped."""
  workdir = tmp_path_factory.mktemp('whole')
  return workdir, fit(workdir, [documents()] * 2)


def test_a_run_follows_its_phases(whole):
  """Every step's context, tokens, MTP weight and learning rate are those of the tokens
  consumed before it; each stage has its own shape."""
  records = metrics_lib.read(whole[0])
  assert int(whole[1].step) == len(records) == 8
  assert [r['context'] for r in records] == [8] * 3 + [32] * 5
  consumed = [r['consumed_tokens'] for r in records]
  assert consumed == [32, 64, 96, 160, 224, 288, 352, 416]
  weights = [r['mtp_weight'] for r in records]
  np.testing.assert_allclose(weights, [0.3] * 5 + [0.1] * 3, rtol=1e-6)
  # warm-up over 96 tokens; the first batch at or after 192, where the decay begins, is
  # at 224, and the one at or after 384, where it ends, at 416
  rates = [1 / 3, 2 / 3, 1, 1, 1, 1, 1 - 0.9 * 64 / 192, 1 - 0.9 * 128 / 192]
  got = [r['learning_rate/adam'] for r in records]
  np.testing.assert_allclose(got, 1e-2 * np.array(rates), rtol=1e-5)


def test_the_router_bias_stops(whole):
  """From 192 tokens on, after step 5, it stays bit for bit; before, it moves."""
  biases = []
  with CheckpointManager(whole[0] / 'pretrain', read_only=True) as manager:
    for step in (4, 6, 8):
      state = manager.restore(step).state
      biases.append(state['variables']['router']['layers'])
  assert not np.array_equal(biases[0], biases[1])
  np.testing.assert_array_equal(biases[1], biases[2])


READS_OF_STAGE_1, READS_OF_STAGE_2 = 4, 14  # of documents, until it dies


@pytest.mark.long
def test_resume_is_bit_identical(tmp_path, whole):
  """Killed in either stage, the run ends with the weights, optimizer and records of the
  run that was not."""
  source = Dying(documents())
  reached = []
  for reads in (READS_OF_STAGE_1, READS_OF_STAGE_2):
    source.left = reads
    with pytest.raises(Killed):
      fit(tmp_path, [source] * 2)
    with CheckpointManager(tmp_path / 'pretrain', read_only=True) as manager:
      reached.append(manager.latest_step())
  assert reached[0] == 2 and reached[1] in (4, 6)
  source.left = 10**9
  state = fit(tmp_path, [source] * 2)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole[1]), strict=True):
    np.testing.assert_array_equal(a, b)
  ignored = {'time_s', 'used_s', 'lineage', 'tokens_per_s'}
  ignored |= {'checkpoint/save_s', 'disk/free_bytes'}

  def curve(workdir):
    records = metrics_lib.read(workdir)
    return [{k: v for k, v in r.items() if k not in ignored} for r in records]

  assert curve(tmp_path) == curve(whole[0])


def test_a_stage_on_other_devices_ends_the_job(tmp_path, whole, caplog, monkeypatch):
  """It says which mesh the next stage wants, and goes on where that is there; a job
  that begins on the wrong devices does not start. (Its steps are those that `whole`
  has compiled.)"""
  first, second = config().stages
  elsewhere = second._replace(mesh=MeshConfig(fsdp=2))
  sources = [documents()] * 2
  compiled = pretrain.make_trainer(config(), CFG, False)

  def make_trainer(config, model, only_mtp, sharding):
    del only_mtp
    return compiled._replace(places=placement.places(config, model, sharding))

  monkeypatch.setattr(pretrain, 'make_trainer', make_trainer)
  with caplog.at_level('WARNING'):
    state = fit(tmp_path, sources, config(stages=(first, elsewhere)))
  assert int(state.step) == 3
  assert 'stages[1].mesh has 2 devices, the job has 1: resume on 2' in caplog.text
  with pytest.raises(ValueError, match=r'stages\[0\].mesh has 2 devices'):
    fit(tmp_path / 'new', sources, config(stages=(elsewhere,)))
  few = dataclasses.replace(config().loop, steps=4)
  state = fit(tmp_path, sources, config(loop=few))
  with CheckpointManager(whole[0] / 'pretrain', read_only=True) as manager:
    want = manager.restore(4, like=state).state
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


def test_what_may_differ_when_a_run_resumes():
  """Meshes, passes and the compiler's options are no part of what is trained; rows and
  rates are."""
  (context, rows, tokens, *_), last = config().stages
  mesh = MeshConfig(fsdp=2)
  other = config(
    stages=(Stage(context, rows, tokens, 2, mesh), last),
    step=dataclasses.replace(config().step, micro_rows=1, compiler_options={'a': 1}),
  )
  assert other != config() and other.on_any_mesh() == config().on_any_mesh()
  for fields in (
    {'stages': ((context, 2 * rows, tokens), last)},
    {'step': dataclasses.replace(config().step, mtp_weight=0.1)},
  ):
    assert config(**fields).on_any_mesh() != config().on_any_mesh()


def test_stages_from_a_config_file():
  """A mapping and a tuple are the same stage; passes are of the stage's rows."""
  mesh = dict(fsdp=2, rules='fsdp')
  mapping = dict(context=8, rows=4, tokens=96, passes=2, mesh=mesh)
  built = config(stages=(mapping, (32, 2, 320)))
  assert built.stages == (
    Stage(8, 4, 96, 2, MeshConfig(fsdp=2, rules='fsdp')),
    Stage(32, 2, 320),
  )
  step = dataclasses.replace(built.step, micro_rows=8)  # more than a batch has
  built = dataclasses.replace(built, step=step)
  assert [built.micro_rows(stage) for stage in built.stages] == [2, 2]
  assert [built.stage_at(step) for step in (0, 2, 3, 7, 8)] == [0, 0, 1, 1, 1]


@pytest.mark.long
def test_only_mtp_leaves_the_main_model(tmp_path, whole):
  """Frozen, every leaf of the main model and its router biases stay bit for bit, while
  every kernel of the modules moves; the main loss is still reported."""
  copy = jax.tree.map(np.array, whole[1].variables)
  state = fit(
    tmp_path,
    [documents()] * 2,
    variables=jax.tree.map(jax.numpy.asarray, copy),
    only_mtp=True,
  )
  after = state.variables
  for part in ('params', 'router'):
    for path, old in jax.tree.leaves_with_path(copy[part]):
      new = after[part]
      for key in path:
        new = new[key.key]
      if path[0].key == 'mtp':
        assert not np.array_equal(new, old), path
      else:
        np.testing.assert_array_equal(new, old)
  assert all(r['loss'] > 0 for r in metrics_lib.read(tmp_path))
  sizes = [leaf.size for leaf in jax.tree.leaves(state.opt_state)]
  modules = sum(leaf.size for leaf in jax.tree.leaves(after['params']['mtp']))
  assert sum(sizes) < 2 * modules + 20  # no optimizer state for what is frozen


@pytest.mark.parametrize(
  ('fields', 'match'),
  [
    ({'stages': ()}, 'stages='),
    ({'stages': ((8, 4, 0), (32, 2, 0))}, 'stages='),
    ({'stages': ((8, 0, 9),)}, 'stages='),
    ({'stages': ((8, 4, 96, 3), (32, 2, 320))}, r'stages\[0\].passes=3'),
    ({'stages': ((8, 4, 96), {'context': 32, 'row': 2})}, r'stages\[1\].*row.*want'),
    ({'stages': ((8, 4, 0, 1, {'fsdp': 0}),)}, r'stages\[0\].*fsdp=0'),
    ({'streams': 4}, 'streams=4'),
    ({'optimizer': OptimizerConfig(schedule=ScheduleConfig('cosine', 0, 9))}, 'phases'),
  ],
)
def test_bad_settings_are_named(fields, match):
  """A broken config says which field and what it should be."""
  with pytest.raises(ValueError, match=rf'PretrainConfig\..*{match}'):
    config(**fields)


@pytest.mark.parametrize(
  ('fields', 'name'),
  [
    ({'tokens': -1}, 'tokens'),
    ({'tokens': 10, 'warmup_tokens': 5, 'decay_tokens': 6}, 'decay_tokens'),
    ({'decay_tokens': 6}, 'decay_tokens'),
    ({'final_fraction': 2.0}, 'final_fraction'),
    ({'bias_updates_until': 1.5}, 'bias_updates_until'),
  ],
)
def test_bad_phases_are_named(fields, name):
  """A decay without a known end would begin nowhere."""
  with pytest.raises(ValueError, match=f'PhasesConfig.{name}='):
    PhasesConfig(**fields)
