"""What a person gets to read who asks for a plan that cannot be."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import jax
import pytest

from configs import m2, pretrain_m2
from experiments import plan as plan_job
from m2jax import config, sharding
from m2jax.plan import chips, plan, topology, workloads
from tests import processes
from tests.plan import fake

MESH = sharding.MeshConfig(fsdp=64, expert=8)
LOAD = workloads.Workload('pretrain', 1536, 8192, meshes=(MESH,), passes=(3,))
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='needs libtpu'
)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
  """libtpu is not among the core dependencies, so this is the first thing many see."""
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"needs libtpu .*pip install -e '\.\[tpu\]'"):
    topology.load('v5p:8x8x8')


def test_another_libtpu_is_named(monkeypatch):
  """It compiles, and then crashes where its HLO is read, without a word."""
  pins = ['numpy>=2.0', 'libtpu==0.0.42.*; extra == "tpu"']
  monkeypatch.setattr(importlib.metadata, 'requires', lambda name: pins)
  topology.check_version('0.0.42.1')
  with pytest.raises(
    ValueError, match=r"0\.0\.52 .* pip install 'libtpu==0\.0\.42\.\*'"
  ):
    topology.check_version('0.0.52')


def test_unknown_topology(monkeypatch):
  """libtpu's own words come with what would have been right."""

  def refuse(**_):
    raise jax.errors.JaxRuntimeError('INVALID_ARGUMENT: Invalid TPU name: TPU v9')

  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: object())
  monkeypatch.setattr(importlib.metadata, 'version', lambda name: '0.0.42.1')
  monkeypatch.setattr(importlib.metadata, 'requires', lambda name: [])
  monkeypatch.setattr(topology.topologies, 'get_topology_desc', refuse)
  for name in topology._ENVIRONMENT:
    monkeypatch.setenv(name, topology._ENVIRONMENT[name])
  with pytest.raises(ValueError, match='v9:2x2.*TPU v9; want GENERATION.*v5p:8x8x8'):
    topology.load('v9:2x2')


@needs_libtpu
@pytest.mark.tpu_backend
@pytest.mark.parametrize('name', ['v9:2x2', 'v5p:3x3x3', 'nonsense'])
def test_unknown_topologies_of_libtpu(name):
  """The same, by libtpu itself."""
  with pytest.raises(ValueError, match=f"topology '{name}': .*want GENERATION"):
    topology.load(name)


def test_unknown_chip():
  """A generation that libtpu knows and the table of figures does not."""
  with pytest.raises(ValueError, match="'TPU v99': m2jax/plan/chips.py has .*v5p"):
    chips.of_kind('TPU v99')


def test_mesh_for_other_chips():
  """A plan for a slice the workload has no mesh for."""
  with pytest.raises(ValueError, match="'m2' has no mesh of 256 devices, only of 512"):
    workloads.place('m2', LOAD, 256)


def test_mesh_that_does_not_match_the_slice():
  """A mesh is never cut to the slice, nor the slice to the mesh."""
  slice_ = topology.Topology('v5p:2x2x1', chips.CHIPS[1], [None] * 4, (2, 2, 1))
  placed = workloads.place('m2', LOAD, 512)
  with pytest.raises(ValueError, match='has 512 devices; v5p:2x2x1 has 4'):
    plan.sharding(placed, slice_)


def test_two_slices_are_a_sentence():
  """A mesh over TPUs of several slices would put each layer's collectives on the links
  between them; mesh_utils answers with an assertion."""
  devices = [
    fake.SliceDevice(i, (i % 2, i // 2 % 2, 0), slice_index=i // 4) for i in range(8)
  ]
  with pytest.raises(ValueError, match='covers 2 TPU slices: a job runs on one slice'):
    sharding.make(sharding.MeshConfig(data=2, fsdp=4), devices)


def test_rows_that_do_not_divide():
  """Rows over passes, and a pass over the mesh."""
  with pytest.raises(ValueError, match='1536 rows do not divide into 5 passes'):
    load = workloads.Workload('pretrain', 1536, 8192, meshes=(MESH,), passes=(5,))
    workloads.place('m2', load, 512)
  where = sharding.Sharding(sharding.abstract_mesh(MESH), sharding.PRESETS['fsdp_ep'])
  load = workloads.Workload('pretrain', 768, 8192, meshes=(MESH,))
  with pytest.raises(ValueError, match='768 rows of a batch do not divide into 512'):
    plan.programs.make(
      workloads.PlanConfig(config.m2(), {'m2': load}),
      workloads.place('m2', load, 512),
      where,
    )


@pytest.mark.parametrize(
  'options', [m2.get_config(), pretrain_m2.get_config().pretrain.step]
)
def test_all_reduces_are_not_offloaded(options):
  """libtpu 0.0.42.1 offloads them unless it is told not to, and then aborts in the
  compilation of meshes with tensor parallelism: every job's options say so."""
  name = 'xla_tpu_enable_sparse_core_collective_offload_all_reduce'
  assert options.compiler_options[name] is False
  assert all(options.compiler_options[name] for name in m2.SPARSE_CORES)


def test_tokens_of_a_step():
  """Whole rows in one pass, or an error with the length of a row."""
  load = LOAD.of_tokens(4_194_304)
  assert (load.rows, load.passes) == (512, (1,))
  with pytest.raises(ValueError, match='--tokens=1000: not a multiple of 8192'):
    LOAD.of_tokens(1000)


@pytest.mark.parametrize('devices', [256, 512, 1024])
@pytest.mark.parametrize('name', m2.get_config().workloads)
def test_the_full_model_divides_over_its_meshes(name, devices):
  """Each cell of docs/plan.md, as far as it goes without compiling."""
  full = plan_job.configuration(m2.get_config().to_dict())
  placed = workloads.place(name, full.workloads[name], devices)
  rules = sharding.PRESETS[placed.mesh.rules]
  where = sharding.Sharding(sharding.abstract_mesh(placed.mesh), rules)
  where.check(full.model)
  load = placed.workload
  training = load.kind in workloads.TRAINING
  where.check_batch(placed.micro_rows, load.context if training else None)
  pieces = where.size('model')
  assert pieces == 1 or full.model.embed_dim // pieces % 8 == 0  # whole tiles
  if training:
    assert load.rows * load.context == 12_582_912


def test_unknown_workload():
  """The ones there are, by name."""
  with pytest.raises(ValueError, match='no workload decoding: there are m2'):
    workloads.select(workloads.PlanConfig(config.m2(), {'m2': LOAD}), ['decoding'])


def test_bad_input_is_one_line():
  """The command itself, as a person meets it."""
  arguments = ['--config=configs/m2.py', '--workloads=decoding']
  child = processes.run('experiments.plan', *arguments, timeout_s=120)
  assert child.returncode == 2
  error = child.stderr.strip().splitlines()[-1]
  assert error.startswith('error: ')
  assert 'no workload decoding' in error or 'libtpu' in error
