"""The estimate beside the bound: shares of the roof, and what they change."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import plan_table
from m2jax import config, sharding
from m2jax.plan import compile as compile_lib
from m2jax.plan import efficiency, estimate, flops, plan, workloads
from tests.plan import fake

V5P = efficiency.V5P
HALF = efficiency.Efficiency(0.5, 0.5, 0.5, 0.5, 0.5)


@pytest.mark.parametrize('field', efficiency.RUNS)
def test_shares_give_the_published_speed(field):
  """What calibration means: the formula at these shares has the published tokens/s, and
  each share is one that a kernel can have."""
  run = efficiency.RUNS[field]
  seconds = run.seconds(efficiency.CALIBRATED, V5P)
  assert run.tokens / seconds == pytest.approx(run.tokens_per_s, rel=1e-4)
  assert 0.3 < getattr(efficiency.CALIBRATED, field) < 0.9


def test_flops_of_the_runs_are_the_published_ones():
  """FLOPs a token that MaxText reports for two of them, by other code: 152.415 TFLOP/s
  at 542.108 tokens/s, and 319.0 TFLOP/s. Executed FLOPs are above those, by what is
  recomputed and padded."""
  deepseek = efficiency.RUNS['experts']
  useful = 152.415e12 / 542.108 * deepseek.tokens
  rows = deepseek.tokens * 8
  experts = deepseek.experts * rows / (rows + 255 * 512)  # without the tiles' padding
  executed = deepseek.core + deepseek.matmul + experts
  assert 4 / 3 < executed / useful < 1.75
  llama = efficiency.RUNS['attention']
  useful = 319.0e12 * llama.tokens / llama.tokens_per_s
  assert (llama.core + llama.matmul) / useful == pytest.approx(7 / 6, rel=0.01)


def test_padding_of_experts_is_counted_once():
  """The share of experts is applied to FLOPs with the padding of tiles, so it is solved
  from FLOPs with it: megablox visits R / 512 + E − 1 tiles of 512 rows. Without it the
  share had been 0.410, and M2's padding was counted in the share as well."""
  run = efficiency.RUNS['experts']
  rows, blocks = run.tokens * 8, 4 * 58 * 3
  tiles = rows // 512 + 256 - 1
  assert run.experts == tiles * 512 * blocks * 2 * 7168 * 2048
  assert efficiency.CALIBRATED.experts == pytest.approx(0.547, abs=5e-4)


def test_gradients_are_summed_as_the_mesh_says():
  """The plan compiles a mesh's `gradient_dtype`, and its table names it."""
  mesh = sharding.MeshConfig(data=2, fsdp=2, gradient_dtype='bfloat16')
  load = workloads.Workload('pretrain', 8, 64, meshes=(mesh,))
  placed = workloads.place('w', load, 4)
  where = plan.sharding(placed, fake.slice_(1, 2, 2))
  assert where.rules.gradient_dtype == 'bfloat16'
  plain = workloads.Workload('pretrain', 8, 64, meshes=(sharding.MeshConfig(fsdp=4),))
  assert plain.of_gradients('bfloat16').meshes[0].gradient_dtype == 'bfloat16'
  shown = {'mesh': dataclasses.asdict(mesh)}
  assert plan_table.mesh(shown) == 'data 2 · fsdp 2 · gradients bfloat16'


def program() -> estimate.Estimate:
  """1 s of attention, of which 0.4 s are kernels, 2 s of experts and 1 s of HBM; 3 s of
  collectives hidden and 1 s exposed."""
  stages = (
    estimate.Stage('forward attention', 0, 0, 1.0, 0.0, core_s=0.4),
    estimate.Stage('forward moe', 0, 0, 2.0, 1.0),
  )
  passes = (
    estimate.Links('forward', 3.0, 1.0, 0.5),
    estimate.Links('backward', 0.0, 0.0, 0.0),
  )
  memory = compile_lib.Memory(*[0] * 7)
  return estimate.Estimate('micro', 1, memory, stages, (), passes, 0.0)


def test_parts_of_a_step_have_their_shares():
  """Each part is divided by its own share; at the roof it is the bound."""
  one = program()
  assert one.seconds == 4 + 1
  assert one.seconds_at(HALF) == 2 * 5
  for field, seconds in (('attention', 0.4), ('matmul', 0.6), ('experts', 2)):
    share = dataclasses.replace(efficiency.ROOF, **{field: 0.5})
    assert one.seconds_at(share) == pytest.approx(5 + seconds)
  links = dataclasses.replace(efficiency.ROOF, links=0.5)
  assert one.seconds_at(links) == 6 + 2  # what was hidden no longer is


def test_imbalance_costs_where_experts_are_split():
  """The busiest chip is waited for; a chip with all experts has its own tokens, however
  they are routed."""
  made = estimate.Plan(
    'w', None, 't', 8, {'expert': 2}, 8, 1, 8, 1.0, 1.0, 1.0, 0, 0, (program(),)
  )
  assert made.estimate_s(efficiency.ROOF, 1.5) == 5 + 0.5 * 3
  alone = dataclasses.replace(made, mesh={'expert': 1})
  assert alone.estimate_s(efficiency.ROOF, 1.5) == 5


def test_kernels_part_of_attention():
  """The kernel's FLOPs of a stage take their share of its time at the roof."""
  cfg = dataclasses.replace(config.m2(), remat='attention')
  mesh = sharding.MeshConfig(fsdp=64, context=2, tensor=4, rules='fsdp')
  where = sharding.Sharding(sharding.abstract_mesh(mesh), sharding.PRESETS['fsdp'])
  load = workloads.Workload('rl', 64, 196_608, meshes=(mesh,))
  placed = workloads.place('rl', load, 512)
  part = plan.local_part(workloads.PlanConfig(cfg, {'rl': load}), placed, where)
  core = flops.core(cfg, part, 128, True)
  executed = flops.executed(cfg, part, 128, True)
  assert core['recompute'] == 0  # attention's output is saved
  for name in ('forward', 'backward'):
    projections = executed[name, 'attention'] - core[name]
    assert 0 < projections < 0.1 * core[name]  # at 192K attention is its kernel
  assert core['backward'] == 3.5 * core['forward']


def test_saved_attention_is_not_computed_again():
  """Of what is recomputed, `remat='attention'` saves the kernels and nothing else."""
  mesh = sharding.MeshConfig(fsdp=64, tensor=4, rules='fsdp')
  where = sharding.Sharding(sharding.abstract_mesh(mesh), sharding.PRESETS['fsdp'])
  load = workloads.Workload('pretrain', 64, 8192, meshes=(mesh,))
  placed = workloads.place('w', load, 256)
  counts = {}
  for remat in ('layer', 'attention'):
    cfg = dataclasses.replace(config.m2(), remat=remat)
    part = plan.local_part(workloads.PlanConfig(cfg, {'w': load}), placed, where)
    counts[remat] = flops.executed(cfg, part, 128, True)
    core = flops.core(cfg, part, 128, True)['forward']
  full, saved = counts['layer'], counts['attention']
  changed = {key: full[key] - saved[key] for key in full if full[key] != saved[key]}
  assert changed == {('recompute', 'attention'): pytest.approx(core)}


def test_memory_of_a_step_is_that_of_its_programs():
  """Programs of chunks, which a step need not run, have a figure of their own."""
  step, chunk = (
    dataclasses.replace(
      program(), runs=runs, memory=compile_lib.Memory(gib << 30, *[0] * 6)
    )
    for runs, gib in ((1, 2), (0, 3))
  )
  made = estimate.Plan(
    'w', None, 't', 8, {}, 8, 1, 8, 1.0, 1.0, 1.0, 0, 0, (step, chunk)
  )
  assert made.memory_bytes == step.memory.total == 2 << 30
  assert made.chunk_bytes == chunk.memory.total == 3 << 30
