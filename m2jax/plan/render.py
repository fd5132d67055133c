"""Plans as text for people, and as data for tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from m2jax.plan import efficiency
from m2jax.plan.estimate import Estimate, Plan
from m2jax.plan.search import Candidate

GIB = 2**30
IMBALANCE = (1.25, 1.5)  # of the busiest experts, over the mean


def report(plan: Plan) -> str:
  """What one device stores, computes and sends, and for how long."""
  shown = {name: value for name, value in plan.mesh.items() if value not in (1, None)}
  mesh = ', '.join(f'{name} {value}' for name, value in shown.items())
  lines = [
    f'{plan.workload} on {plan.topology}: {plan.devices} devices ({mesh})',
    f'  of {plan.job}' if plan.job else '  no job runs these programs yet',
    f'  {plan.rows} rows, {plan.tokens:,} tokens a step, {plan.passes} passes',
    '  memory of a device, GiB:',
    f'    parameters {_gib(plan.parameters_bytes)}, '
    f'optimizer {_gib(plan.optimizer_bytes)}',
  ]
  for program in plan.programs:
    lines += _program(program)
  verdict = 'fits' if plan.fits else 'does NOT fit'
  lines += [
    f'  {verdict}: {_gib(plan.memory_bytes)} of {_gib(plan.hbm_bytes)} GiB, '
    f'{_gib(plan.hbm_bytes - plan.memory_bytes)} left',
    f'  bound:    {_speed(plan, plan.seconds)} (useful FLOPs; no kernel reaches its '
    'roofline)',
    f'  estimate: {_speed(plan, plan.estimate_s())} (kernels as in published runs, see '
    '--calibrate)',
  ]
  if plan.chunk_bytes:
    verdict = 'fit' if plan.chunk_bytes <= plan.hbm_bytes else 'do NOT fit'
    lines.insert(-2, f'  chunks of trees {verdict}: {_gib(plan.chunk_bytes)} GiB')
  if plan.splits_experts:
    lines += [
      f'  with {load} times the mean load on the busiest experts: '
      f'{_speed(plan, plan.estimate_s(imbalance=load))}'
      for load in IMBALANCE
    ]
  else:
    lines.append(
      '  an imbalance of experts changes nothing: every chip has all of them'
    )
  return '\n'.join(lines)


def _speed(plan: Plan, seconds: float) -> str:
  tokens = plan.tokens / seconds / plan.devices
  return (
    f'{seconds * 1e3:,.1f} ms a step, {tokens:,.0f} tokens/s a device, '
    f'{plan.share(seconds):.1%} of peak'
  )


def calibration() -> str:
  """Shares of the roofs, the published runs, and how far one share misses them."""
  share, chip = efficiency.CALIBRATED, efficiency.V5P
  lines = ['shares of the roof on v5p:']
  for field, value in dataclasses.asdict(share).items():
    run = efficiency.RUNS.get(field)
    lines.append(f'  {field:10s} {value:.3f}  {run.name if run else "assumed"}')
  lines += [
    '',
    'run                                 tokens/s a chip      seconds of a step',
    '                                  published  formula   at the roof  formula  '
    'error with one share for all matmuls',
  ]
  errors = efficiency.spread(chip, share)
  for run in efficiency.RUNS.values():
    roof, seconds = run.seconds(efficiency.ROOF, chip), run.seconds(share, chip)
    lines.append(
      f'{run.name:34s} {run.tokens_per_s:8,.1f} {run.tokens / seconds:8,.1f} '
      f'{roof:13,.1f} {seconds:8,.1f}  {errors[run.name] - 1:+.1%}'
    )
  return '\n'.join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
  """All fields of a plan, and what follows from them."""
  bound = {'compute_bound_s': 0.0, 'hbm_bound_s': 0.0, 'links_s': 0.0}
  for program in plan.programs:
    stages = 0.0
    for s in program.stages:
      for which in ('compute_bound_s', 'hbm_bound_s'):
        bound[which] += program.runs * getattr(s, which)
      stages += s.seconds
    bound['links_s'] += program.runs * (program.seconds - stages)
  fields = dataclasses.asdict(plan)
  for program, one in zip(plan.programs, fields['programs'], strict=True):
    one['seconds'] = program.seconds
    one['estimate_s'] = program.seconds_at(efficiency.CALIBRATED)
  return {
    **fields,
    'seconds': plan.seconds,
    'share_of_peak': plan.share_of_peak,
    'estimate_s': plan.estimate_s(),
    'estimated_share': plan.share(plan.estimate_s()),
    'splits_experts': plan.splits_experts,
    'imbalance_s': {str(load): plan.estimate_s(imbalance=load) for load in IMBALANCE},
    'memory_bytes': plan.memory_bytes,
    'fits': plan.fits,
    'chunk_bytes': plan.chunk_bytes,
    'bound': bound,
  }


def candidates(name: str, found: Sequence[Candidate], topology: str) -> str:
  """The first of a search, by the formula."""
  lines = [f'{name} on {topology}: {len(found)} choices fit; by the formula']
  for c in found[:8]:
    sizes = {axis: n for axis, n in c.placed.mesh.sizes.items() if n > 1}
    mesh = ', '.join(f'{axis} {n}' for axis, n in sizes.items())
    lines.append(
      f'  {c.seconds * 1e3:10,.0f} ms {_gib(c.memory_bytes):>7} GiB  '
      f'{c.placed.passes} passes, remat {c.placed.workload.remat}, {mesh}'
    )
  return '\n'.join(lines)


def _program(program: Estimate) -> list[str]:
  memory = program.memory
  lines = [
    f'  {program.name} x {program.runs or "each chunk"}: '
    f'{program.seconds * 1e3:,.1f} ms '
    f'(compiled in {program.compile_s:.0f} s)',
    f'    memory {_gib(memory.total)}: arguments {_gib(memory.arguments)} '
    f'(padding {_gib(memory.padding)}), outputs {_gib(memory.outputs)}, '
    f'saved activations {_gib(memory.saved)}, temporaries {_gib(memory.temporaries)}, '
    f'resident {_gib(memory.resident)}, code {_gib(memory.code)}',
  ]
  if any(s.seconds > 5e-5 for s in program.stages):
    lines.append('    stage                    TFLOP      GB  ms by compute   by HBM')
  for s in program.stages:
    if s.seconds > 5e-5:
      lines.append(
        f'    {s.name:22s} {s.flops / 1e12:8.1f} {s.hbm_bytes / 1e9:8.1f} '
        f'{s.compute_bound_s * 1e3:14.1f} {s.hbm_bound_s * 1e3:8.1f}'
      )
  if program.collectives:
    lines.append('    collective        group  count       GB   hidden ms  exposed ms')
  for c in program.collectives:
    lines.append(
      f'    {c.kind:18s} {c.group:4d} {c.count:6d} {c.bytes / 1e9:8.2f} '
      f'{c.hidden_s * 1e3:11.1f} {c.exposed_s * 1e3:11.1f}'
    )
  return lines


def _gib(size: float) -> str:
  return f'{size / GIB:.2f}'
