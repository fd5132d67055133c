"""Every config that names a topology starts there: each stage, to its first step.

The slice is faked: its chips' places, and a process for each host of 2x2x1 chips, as
libtpu numbers them (`test_the_slice_is_libtpus`). Programs are lowered for as many
devices without having any.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
from unittest import mock

import jax
import numpy as np
import pytest

from configs import m2, pretrain_m2
from experiments import common
from experiments import plan as plan_job
from experiments import pretrain as pretrain_job
from launch import topology as launch_topology
from m2jax import platforms
from m2jax import sharding as sharding_lib
from m2jax.forest import Forest
from m2jax.optim import optimizer as optimizer_lib
from m2jax.plan import programs, topology, workloads
from m2jax.plan.workloads import TRAINING, Placed, Workload
from m2jax.train import hosts, placement, pretrain, stages
from m2jax.train import step as train_step
from tests.plan import fake
from tests.train import test_hosts, test_pretrain

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
PRETRAINING = [pretrain_m2]  # test_configs_say_their_topology finds others


def slice_of(name: str) -> list[fake.Device]:
  """The devices of a slice such as 'v5p:8x8x8', with their processes."""
  shape = launch_topology.parse(name).shape
  across, along = -(-shape[0] // 2), -(-shape[1] // 2)  # hosts

  def process(x, y, z):
    return (z * along + y // 2) * across + x // 2

  return [
    dataclasses.replace(device, process_index=process(*device.coords))
    for device in fake.slice_(*shape).devices
  ]


def on_slice(devices, process: int = 0):
  """JAX of one process of a slice."""
  return mock.patch.multiple(
    jax, devices=lambda: list(devices), process_index=lambda: process
  )


def built(module) -> tuple[pretrain_job.Config, list[fake.Device]]:
  """Settings of a job, and the devices that its config names."""
  config = common.build(pretrain_job.Config, module.get_config())
  return config, slice_of(module.TOPOLOGY)


def all_hosts(where: sharding_lib.Sharding, devices, streams: int) -> list[hosts.Hosts]:
  """What each process reads."""
  found = []
  for process in range(1 + max(device.process_index for device in devices)):
    with on_slice(devices, process):
      found.append(hosts.find(where, streams))
  return found


def test_configs_say_their_topology():
  """One that speaks of a slice names it in a constant, and is tested here."""
  for path in CONFIGS.glob('*.py'):
    named = re.findall(r'\bv\d\w?[:-]\d+|\b\d+x\d+x\d+\b', path.read_text())
    module = importlib.import_module(f'configs.{path.stem}')
    said = getattr(module, 'TOPOLOGY', None) or getattr(module, 'TOPOLOGIES', None)
    assert bool(named) == bool(said), path.name
    if hasattr(module, 'TOPOLOGY'):
      assert module in PRETRAINING


@pytest.mark.skipif(not importlib.util.find_spec('libtpu'), reason='needs libtpu')
@pytest.mark.tpu_backend
@pytest.mark.parametrize('name', m2.TOPOLOGIES)
def test_the_slice_is_libtpus(name):
  """Places, processes and the number of hosts are those of the compiler's slice."""

  def groups(devices):
    found = {}
    for device in devices:
      found.setdefault(device.process_index, []).append(tuple(device.coords))
    return sorted(map(sorted, found.values()))

  ours = groups(slice_of(name))
  assert groups(topology.load(name).devices) == ours
  assert len(ours) == launch_topology.parse(name).hosts


def note_rows(process, rows_of, shape, place, read):
  """Stands for `jax.make_array_from_callback` in a process: notes its devices' rows."""
  for device, index in place.devices_indices_map(shape).items():
    if device.process_index == process:
      got = tuple(read(index)[:, 0].tolist())
      rows_of.setdefault(index[0].start or 0, set()).add(got)


def check_reading(where, devices, streams: int, rows: int, micro_rows: int):
  """Rows divide over hosts and shards, and a pass is put together from all its rows,
  each once; returns the hosts of all processes."""
  found = all_hosts(where, devices, streams)
  count = found[0].count
  assert {(h.index, h.count) for h in found} == {(n, count) for n in range(count)}
  assert rows % count == micro_rows % count == 0 and streams % count == 0
  assert rows % micro_rows == 0 and micro_rows % where.size('rows') == 0
  local = micro_rows // count
  rows_of: dict[int, set[tuple[int, ...]]] = {}  # by where they begin in the batch
  empty = dict.fromkeys(field.name for field in dataclasses.fields(Forest))
  for process, host in enumerate(found):
    tokens = np.arange(host.index * local, (host.index + 1) * local)[:, None]
    tokens = np.broadcast_to(tokens, (local, 2 * where.size('tokens')))
    assembled = functools.partial(note_rows, process, rows_of)
    with mock.patch.object(jax, 'make_array_from_callback', assembled):
      hosts.place(Forest(**{**empty, 'tokens': tokens}), host, where)
  assert all(len(seen) == 1 for seen in rows_of.values())  # on all devices alike
  every = [row for (seen,) in rows_of.values() for row in seen]
  assert sorted(every) == list(range(micro_rows))
  return found


@pytest.mark.parametrize('module', PRETRAINING)
def test_every_stage_divides_over_the_processes(module):
  """Rows, streams and passes of every stage fit its mesh and the slice's processes."""
  config, devices = built(module)
  job = config.pretrain
  with on_slice(devices):
    where = placement.places(job, config.model, sharding_lib.make(config.mesh))
  parts = []
  for stage in job.stages:
    assert where[stage] is not None, 'a mesh of other devices'
    mesh, rows = where[stage].sharding, job.micro_rows(stage)
    parts.append(check_reading(mesh, devices, job.num_streams, stage.rows, rows))
    assert parts[-1][0].count >= 16  # nobody reads much more than its own
  through_the_stages(job, parts)


def test_a_stage_that_does_not_fit_is_named():
  """At the start, though the run would reach it in half a year."""
  config, devices = built(pretrain_m2)
  first, second, third = config.pretrain.stages
  second = second._replace(passes=2)
  job = dataclasses.replace(config.pretrain, stages=(first, second, third))
  with on_slice(devices), pytest.raises(ValueError, match=r'stages\[1\].*192 rows'):
    placement.places(job, config.model, sharding_lib.make(config.mesh))


def through_the_stages(job: stages.PretrainConfig, parts):
  """All processes read two batches of each stage, of a few tokens, and are stopped and
  resumed before, between and after: every token once."""
  small = tuple(
    stages.Stage(2**number, stage.rows, 2 ** (number + 1) * stage.rows)
    for number, stage in enumerate(job.stages)
  )
  config = test_pretrain.config(
    stages=small, streams=job.num_streams, phases=stages.PhasesConfig()
  )
  total = sum(stage.tokens for stage in small)
  source = list(np.arange(total).reshape(job.num_streams, -1))
  processes = [[(h.index, h.count) for h in each] for each in zip(*parts, strict=True)]
  seen, position = [], None
  for _ in range(2 * len(small)):
    run = test_hosts.Hosts(config, [source] * len(small), processes, position)
    (batch,) = run.batches()
    number = config.stages.index(batch[0].stage)
    first = {host[number]: process for process, host in enumerate(processes)}
    seen += test_hosts.tokens_of([batch], first.values())
    position = run.state()
  assert sorted(seen) == list(range(total))


def planned():
  """Name, slice and placement of each training workload of configs/m2.py."""
  config = plan_job.configuration(m2.get_config().to_dict())
  for name in m2.TOPOLOGIES:
    chips = launch_topology.parse(name).chips
    for load, workload in config.workloads.items():
      if workload.kind in TRAINING:
        yield name, workloads.place(load, workload, chips)


@pytest.mark.parametrize(
  ('name', 'placed'), list(planned()), ids=lambda value: getattr(value, 'name', value)
)
def test_planned_workloads_divide_over_the_processes(name, placed):
  """What is planned for a slice could be fed there."""
  devices = slice_of(name)
  with on_slice(devices):
    where = sharding_lib.make(placed.mesh)
  check_reading(where, devices, 0, placed.workload.rows, placed.micro_rows)


def test_m2_trains_what_is_planned():
  """The stages of configs/pretrain_m2.py have rows, mesh and passes of a workload of
  configs/m2.py for the same slice."""
  config, _ = built(pretrain_m2)
  found = {
    (p.workload.rows, p.workload.context): (p.mesh, p.passes)
    for name, p in planned()
    if name == pretrain_m2.TOPOLOGY
  }
  for stage in config.pretrain.stages:
    mesh = stage.mesh or config.mesh
    assert found[stage.rows, stage.context] == (mesh, stage.passes)


def every_stage():
  """Each (module, number); tests/sharding/test_lowering.py has a fast form."""
  for module in PRETRAINING:
    for number in range(len(module.get_config().pretrain.stages)):
      yield module, number


@pytest.mark.long
@pytest.mark.parametrize(('module', 'number'), list(every_stage()))
def test_the_first_step_of_every_stage_lowers(module, number):
  """Two layers of the model, all else as it is: the job's own programs, for TPU, on the
  stage's mesh."""
  config, devices = built(module)
  job, model = config.pretrain, dataclasses.replace(config.model, num_layers=2)
  stage = job.stages[number]
  mesh = stage.mesh or config.mesh
  where = sharding_lib.Sharding(
    sharding_lib.abstract_mesh(mesh), sharding_lib.PRESETS[mesh.rules]
  )
  optimizer = optimizer_lib.make(
    dataclasses.replace(job.optimizer, schedule=stages.schedule(job))
  )
  consumed = sum(before.tokens for before in job.stages[:number])
  settings = stages.settings(job, consumed)
  step = pretrain.step_config(job, stage, settings)
  parts = train_step.programs(model, optimizer, train_step.nll, step, where)
  state = jax.eval_shape(
    lambda key: train_step.new_state(model, optimizer, key), jax.random.key(0)
  )
  specs = train_step.state_specs(model, optimizer, where.rules)
  state = where.shaped(state, specs)
  load = Workload('pretrain', stage.rows, stage.context)
  placed = Placed('', load, mesh, stage.rows // step.micro_rows)
  batch = programs.batch(model, placed)
  batch = where.shaped(batch, sharding_lib.batch_specs(where.rules))
  with platforms.any_platform():
    micro = parts.micro.trace(state.variables, batch)
    sums = where.shaped(micro.out_info, jax.sharding.PartitionSpec())
    apply = parts.apply.trace(state, sums)
  for traced in (micro, apply):
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
    assert f'mhlo.num_partitions = {len(devices)}' in text
