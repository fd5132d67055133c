"""Compares kernels with their roofline bound and the best other implementation.

  python -m benchmarks.kernels                      # all ops, on this machine's device
  python -m benchmarks.kernels --ops=paged_attention --cases=decode --json
  python -m benchmarks.kernels --tune=tree_attention

There is one row per case and implementation. `ms` is the fastest of --runs runs,
without compilation; `both` is the value and all gradients. `bound_ms` is the roofline
bound: the larger of operations / peak FLOP/s and bytes / peak bandwidth. The peaks are
the vendor's figures for bf16 on TPU and GPU; on a CPU, the maximum that a matmul and a
copy reach between the ops. Only operations that the result needs are counted (visible
pairs, rows that belong to a group), not recomputed scores or logits. `fraction` is
bound_ms / ms. `error` is ‖Δ‖₂ / ‖reference‖₂, the larger of value and gradients,
relative to the op's reference in float64 at a small shape, in the dtype of the timing.
Peers are third-party kernels or plain XLA; those that do not run on this device are
skipped, with the reason.

`--tune` times candidate block sizes on a TPU or GPU and prints the best, to be entered
in the device's file in m2jax/kernels/block_sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_cases
from m2jax.kernels import block_sizes
from m2jax.plan.chips import CHIPS

# prefix of `device_kind`: FLOP/s in bf16 and bytes/s; of GPUs from the vendor
PEAKS = {chip.device_kind: (chip.peak_flops, chip.hbm_bandwidth) for chip in CHIPS} | {
  'NVIDIA A100': (312e12, 2039e9),
  'NVIDIA H100': (989e12, 3350e9),
  'NVIDIA H200': (989e12, 4800e9),
}
# By platform and sizes; those of an op begin with its name.
CANDIDATES = {
  ('tpu', 'tree_attention'): dict(
    tokens=(256, 512, 1024), group_tokens=(2048, 4096, 8192)
  ),
  ('tpu', 'grouped_matmul'): dict(
    rows=(256, 512), chunk=(128, 256), columns=(512, 768), d_rhs_columns=(768, 1024)
  ),
  ('tpu', 'qk_norm_rope'): dict(tokens=(128, 256)),
  ('tpu', 'paged_attention'): dict(tokens=(256, 512, 1024), queries=(256, 512, 1024)),
  ('gpu', 'tree_attention'): dict(
    tokens=(64, 128), partner_tokens=(64, 128), warps=(4, 8), stages=(2, 3)
  ),
  ('gpu', 'tree_attention_backward'): dict(
    tokens=(64, 128), partner_tokens=(32, 64), warps=(4, 8), stages=(2, 3)
  ),
  ('gpu', 'grouped_matmul'): dict(
    rows=(64, 128), columns=(64, 128), inner=(32, 64), warps=(4, 8), stages=(2, 3, 4)
  ),
  ('gpu', 'paged_attention'): dict(
    programs=(132, 264, 528), keys=(64, 128), slots=(2, 3, 4)
  ),
  ('gpu', 'qk_norm_rope'): dict(tokens=(4, 16, 64), warps=(4, 8, 16)),
}
_LEAST_S = 5e-3  # of a measurement on a device with a queue


def seconds(function, *arrays, runs: int) -> float:
  """The fastest of up to `runs` runs within three seconds, after one that compiles.

  On a TPU or GPU a run is as many calls as take some milliseconds, queued one after the
  other: a single call would be timed with the time to dispatch it and to see its end.
  """
  jax.block_until_ready(function(*arrays))

  def run(calls):
    started = time.perf_counter()
    for _ in range(calls):
      out = function(*arrays)
    jax.block_until_ready(out)
    return (time.perf_counter() - started) / calls

  calls = 1
  if jax.default_backend() != 'cpu':
    calls = 1 + int(_LEAST_S / run(1))
  times = []
  while len(times) < runs and calls * sum(times) < 3:
    times.append(run(calls))
  return min(times)


def peaks() -> tuple[float, float]:
  """FLOP/s and bytes/s of this machine's device."""
  kind = jax.devices()[0].device_kind
  for name, peak in PEAKS.items():
    if kind.startswith(name):
      return peak
  n = 1024
  square = jnp.ones((n, n), jnp.float32)
  matmul = seconds(jax.jit(jnp.matmul), square, square, runs=40)
  # Copies into an existing array; a new one would also time page faults.
  source, target = np.ones((2, 1 << 22), np.float32)
  copy = seconds(np.copyto, target, source, runs=40)
  return 2 * n**3 / matmul, 2 * source.nbytes / copy


def value_and_grads(function, wrt: int):
  """A function that returns the value and the VJPs of the first `wrt` arrays.

  Its last array is the cotangent.
  """
  if not wrt:
    return jax.jit(lambda *arrays: (function(*arrays[:-1]),))

  @jax.jit
  def both(*arrays):
    *arrays, weight = arrays
    run = lambda *leading: function(*leading, *arrays[wrt:])
    out, vjp = jax.vjp(run, *arrays[:wrt])
    return out, *vjp(weight.astype(out.dtype))

  return both


def error(function, wrt: int, arrays, want) -> float:
  """The largest ‖Δ‖₂ / ‖reference‖₂ of value and gradients."""
  got = value_and_grads(function, wrt)(*arrays)
  return max(
    float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b))
    for a, b in zip(got, want, strict=True)
  )


def exact(op: kernel_cases.Op, arrays):
  """Value and gradients of the reference in float64, on a CPU."""
  with jax.enable_x64(), jax.default_device(jax.devices('cpu')[0]):
    wide = [
      np.float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
      for x in arrays
    ]
    return [np.asarray(x) for x in value_and_grads(op.reference, op.wrt)(*wide)]


def cases_of(op: kernel_cases.Op, platform: str) -> dict[str, dict]:
  """Shapes by the name of a case."""
  return op.cases[platform if platform in op.cases else 'accelerator']


def rows(op: kernel_cases.Op, platform: str, runs: int, part: str = ''):
  """Yields one dict per case, pass and implementation, without bounds.

  Args:
    part: only cases whose names contain this.
  """
  for case, shape in cases_of(op, platform).items():
    if part not in case:
      continue
    arrays = op.make(**shape)
    small = op.make(**{**shape, **op.small})
    want = exact(op, small)
    implementations = {'m2jax': op.ours, **op.peers(platform, **shape)}
    for name, function in implementations.items():
      passes = {
        'forward': jax.jit(lambda *a, f=function: f(*a[:-1])),
        'both': value_and_grads(function, op.wrt),
      }
      if not op.wrt:
        del passes['both']
      row = dict(op=op.name, case=case, implementation=name)
      try:
        worst = error(function, op.wrt, small, want)
        timed = {p: seconds(f, *arrays, runs=runs) for p, f in passes.items()}
      except Exception as e:  # a peer may fail in any way; ours must not
        if name == 'm2jax':
          raise
        yield row | dict(skipped=f'{type(e).__name__}: {e}'.split('\n')[0][:120])
        continue
      for which, spent in timed.items():
        flops, size = op.cost(arrays, which == 'both')
        yield row | dict(
          which=which, ms=1e3 * spent, error=worst, flops=flops, bytes=size
        )


def bounded(row: dict, flops_s: float, bytes_s: float) -> dict:
  """The row with the roofline bound."""
  if 'ms' not in row:
    return row
  compute, memory = 1e3 * row['flops'] / flops_s, 1e3 * row['bytes'] / bytes_s
  bound = max(compute, memory)
  limit = 'compute' if compute > memory else 'memory'
  return row | dict(bound_ms=bound, limit=limit, fraction=bound / row['ms'])


def show(found: list[dict]) -> None:
  """Prints one line per case, pass and implementation; ours with the best peer."""
  line = '{:<16}{:<27}{:<9}{:<28}{:>10}{:>10}{:>9}{:>10}  {}'
  print(
    line.format(
      *('op', 'case', 'pass', 'implementation', 'ms', 'bound ms', 'fraction', 'error'),
      'of the best peer',
    )
  )
  keys = dict.fromkeys((r['op'], r['case'], r['which']) for r in found if 'ms' in r)
  for key in keys:
    same = [r for r in found if 'ms' in r and (r['op'], r['case'], r['which']) == key]
    peers = [r for r in same if r['implementation'] != 'm2jax']
    best = min(peers, key=lambda r: r['ms'], default=None)
    for r in same:
      ratio = ''
      if best and r['implementation'] == 'm2jax':
        ratio = f'{best["ms"] / r["ms"]:.2f}x {best["implementation"]}'
      figures = f'{r["ms"]:.3f}', f'{r["bound_ms"]:.3f}', f'{r["fraction"]:.3f}'
      print(
        line.format(*key, r['implementation'], *figures, f'{r["error"]:.1e}', ratio)
      )
  for r in found:
    if 'skipped' in r:
      print(f'skipped {r["op"]}, {r["case"]}: {r["implementation"]}: {r["skipped"]}')


def tune(name: str, platform: str, runs: int) -> None:
  """Prints the candidate sizes with the smallest geometric mean time over all cases."""
  names = CANDIDATES.get((platform, name))
  if names is None:
    raise SystemExit(f'{name} has no block sizes to tune on {platform}')
  op = next(op for op in kernel_cases.OPS.values() if name.startswith(op.name))
  cases = {name: op.make(**shape) for name, shape in op.cases['accelerator'].items()}
  best = None
  for values in itertools.product(*names.values()):
    sizes = dict(zip(names, values, strict=True))
    times = []
    with block_sizes.replaced(platform, name, **sizes):
      try:
        for arrays in cases.values():
          times.append(seconds(value_and_grads(op.ours, op.wrt), *arrays, runs=runs))
      except Exception as e:  # sizes that do not fit
        print(sizes, 'skipped:', str(e).split('\n')[0][:100])
        continue
    mean = float(np.exp(np.mean(np.log(times))))
    print(sizes, *(f'{1e3 * t:.3f}' for t in times), flush=True)
    if best is None or mean < best[0]:
      best = mean, sizes
  print(f'{jax.devices()[0].device_kind}: {name!r}: {best and best[1]}')


def main(argv=None) -> list[dict]:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--ops', default=','.join(kernel_cases.OPS))
  parser.add_argument('--cases', default='', help='part of their names')
  parser.add_argument('--runs', type=int, default=10)
  parser.add_argument('--json', action='store_true')
  parser.add_argument('--tune', choices=sorted({name for _, name in CANDIDATES}))
  args = parser.parse_args(argv)
  unknown = set(args.ops.split(',')) - set(kernel_cases.OPS)
  if unknown:
    parser.error(
      f'--ops: unknown {sorted(unknown)}; choose from {list(kernel_cases.OPS)}'
    )
  platform = jax.default_backend()
  ops = [kernel_cases.OPS[name] for name in args.ops.split(',')]
  names = [case for op in ops for case in cases_of(op, platform)]
  if args.cases and not any(args.cases in name for name in names):
    parser.error(f'--cases: none has {args.cases!r} in its name; there are {names}')
  if args.tune:
    tune(args.tune, platform, args.runs)
    return []
  found, peak = [], [peaks()]
  for op in ops:
    for row in rows(op, platform, args.runs, args.cases):
      print(*row.values(), file=sys.stderr, flush=True)
      found.append(row)
    peak.append(peaks())
  flops_s, bytes_s = (max(p) for p in zip(*peak, strict=True))
  found = [bounded(row, flops_s, bytes_s) for row in found]
  device = dict(
    device=jax.devices()[0].device_kind,
    peak_tflop_s=flops_s / 1e12,
    peak_gb_s=bytes_s / 1e9,
    jax=jax.__version__,
  )
  if args.json:
    print(json.dumps(dict(device=device, rows=found), indent=1))
  else:
    print(device)
    show(found)
  return found


if __name__ == '__main__':
  main()
