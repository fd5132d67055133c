"""What prefix-tree merging gains: the same loss and gradient from fewer tokens.

  python -m benchmarks.prefix_tree                          # the whole table
  python -m benchmarks.prefix_tree --workloads terminal --rounds 3
  python -m benchmarks.prefix_tree --pool=RUN --groups=8    # batches that a run trained
  python -m benchmarks.prefix_tree --merge                  # how fast `merge` itself is

Measures one gradient of one batch: forward and backward of every row, without the
optimizer update, which is the same for all. The kinds of rows
(benchmarks/prefix_tree_rows.py makes them):

  (a) one row per completion, dense causal, its length rounded up to 128
  (b) append-only merge: completions that continue each other computed once, packed
    into rows of up to --row_tokens
  (c) the common prompt shared, everything after it separate
  (d) the prefix tree in one row
  (e) the prefix tree in chunks of up to a quarter, by push and pop
  (f) rows or chunks of up to --row_tokens, as `rl.packing` chooses: bounded memory

Rows of one shape run together, up to --batch_tokens. Times are medians over rounds;
in each round every kind runs once. If all batches of a kind would take longer than
--limit_s, a subset of them, evenly spaced, runs and the time is scaled by counted
operations. "Ideal" is the ratio of counted operations (matmuls and visible pairs,
without padding); both sides use the same attention, and (e) includes its second forward
pass.

Expert ids are recorded once and replayed by every kind (law 3). Differences are to the
first kind, on the completions that ran; the weights of all others are 0.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from benchmarks import harness, prefix_tree_rows
from benchmarks import prefix_tree_workloads as workloads
from benchmarks.prefix_tree_rows import Kind
from m2jax import forest, startup
from m2jax.layers import prefix_cache
from m2jax.rl import learner
from m2jax.train import chunks
from m2jax.train import step as train_step

OBJECTIVE = learner.Objective()
STEP = train_step.StepConfig()
# Unlike wall time, CPU time of this process hardly depends on other processes.
CLOCKS = {'wall': time.monotonic, 'cpu': time.process_time}


class Runner:
  """Compiles, runs and compares the kinds of one workload."""

  def __init__(self, cfg):
    self.cfg = cfg
    self.variables = prefix_tree_rows.variables_of(cfg)
    self.parts = chunks.programs(cfg, OBJECTIVE, STEP)
    loss = functools.partial(
      train_step.loss_and_loads, cfg=cfg, objective=OBJECTIVE, config=STEP
    )

    def micro(variables, batch):
      grads, (metrics, loads) = jax.grad(loss, has_aux=True)(
        variables['params'], variables['router'], batch
      )
      return grads, metrics, loads

    self._micro = jax.jit(micro)
    self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    self._compiled = {}

  def run(self, kind: Kind, chosen, weights=None):
    """Gradients and metrics, summed over the chosen batches.

    Args:
      weights: a factor for each sample's weights; None: 1.
    """
    sums = None
    for i in chosen:
      batch = kind.batches[i]
      if isinstance(batch, forest.Plan):
        if weights is not None:
          batch = dataclasses.replace(batch, tree=masked(batch.tree, weights))
        out = chunks.gradients(self.parts, self.variables, batch)
      else:
        batch = batch if weights is None else masked(batch, weights)
        out = self._program(batch)(self.variables, batch)
      sums = out if sums is None else self._add(sums, out)
    return jax.block_until_ready(sums)

  def _program(self, batch):
    shape = batch.tokens.shape, batch.weight.shape
    if shape not in self._compiled:
      self._compiled[shape] = self._micro.lower(self.variables, batch).compile()
    return self._compiled[shape]

  def compile(self, kind: Kind):
    """Compiles every shape, and records the number of programs and their memory."""
    if isinstance(kind.batches[0], forest.Plan):
      self.run(kind, [0])
      shapes = {c.shape for c in kind.batches[0]}
      kind.programs = len(shapes)
      kind.memory_bytes = self._chunk_bytes(kind.batches[0])
      return
    seen = {}
    for i in kind.chosen:
      program = self._program(kind.batches[i])
      seen[id(program)] = program
    kind.programs = len(seen)
    kind.memory_bytes = max(_bytes(p) for p in seen.values())

  def _chunk_bytes(self, plan):
    """Bytes of the largest chunk program: arguments (and stack) and temporaries."""
    largest = 0
    size = chunks.stack_slots(plan.buckets)
    done = set()
    for chunk in plan:
      if chunk.kind == 'push' or chunk.shape in done:
        continue
      done.add(chunk.shape)
      slots = size if chunk.shape[2] or chunk.kind == 'pop' else 0
      stack = prefix_cache.empty(self.cfg, 1, slots)
      sums = self.parts.zeros(self.variables, chunk.batch)
      args = (self.variables, sums, stack, stack, chunk.batch)
      if chunk.kind == 'pop':
        args += (chunk.start,)
      lowered = getattr(self.parts, chunk.kind).lower(*args)
      largest = max(largest, _bytes(lowered.compile()))
    return largest


def _bytes(program) -> int:
  m = program.memory_analysis()
  return (
    m.temp_size_in_bytes
    + m.argument_size_in_bytes
    + m.output_size_in_bytes
    - m.alias_size_in_bytes
  )


def masked(batch: forest.Forest, factor: np.ndarray) -> forest.Forest:
  """The batch with each term's weight multiplied by the factor of its sample."""
  return dataclasses.replace(batch, weight=batch.weight * factor[batch.term_sample])


def choose(kind: Kind, rate: float, limit_s: float, cfg) -> None:
  """Chooses evenly spaced batches: about limit_s at `rate` operations per second."""
  n = len(kind.batches)
  share = min(1.0, limit_s * rate / kind.total(cfg))
  m = max(1, min(n, int(n * share)))
  kind.chosen = [int((i + 0.5) * n / m) for i in range(m)]


def measure(name: str, trajectories: workloads.Trajectories, args, cfg) -> list[dict]:
  """Runs a workload; returns one table row per kind."""
  largest = max(int(s.tokens.max()) for t in trajectories for s in t)
  cfg = dataclasses.replace(cfg, vocab_size=max(cfg.vocab_size, largest + 1))
  found = [
    k for k in prefix_tree_rows.kinds(trajectories, cfg, args) if k.name in args.kinds
  ]
  samples = [s for trajectory in trajectories for s in trajectory]
  runner = Runner(cfg)
  clock = CLOCKS[args.clock]
  rate = None
  for kind in sorted(found, key=lambda k: k.total(cfg)):
    if rate is not None:
      choose(kind, rate, args.limit_s, cfg)
    runner.compile(kind)
    one = kind.chosen[len(kind.chosen) // 2 :][:1]
    started = clock()
    runner.run(kind, one)
    rate = kind.total(cfg, one) / (clock() - started)
  for _ in range(args.rounds):
    for kind in found:
      started = clock()
      kind.sums = runner.run(kind, kind.chosen)
      kind.seconds.append(clock() - started)
      logging.info('%s (%s): %.1f s', name, kind.name, kind.seconds[-1])
  differences = compare(runner, found, len(samples))
  base = found[0]
  rows = []
  for kind in found:
    done = kind.total(cfg, kind.chosen) / kind.total(cfg)
    seconds = float(np.median(kind.seconds)) / done
    rows.append(
      {
        'workload': name,
        'rows': kind.name,
        'input_tokens': base_tokens(samples),
        'tokens': kind.tokens,
        'compression': base_tokens(samples) / kind.tokens,
        'pairs_ratio': pairs(base) / pairs(kind),
        'seconds': seconds,
        'spread': float(np.ptp(kind.seconds)) / float(np.median(kind.seconds)),
        'batches': f'{len(kind.chosen)}/{len(kind.batches)}',
        'ideal': base.total(cfg) / kind.total(cfg),
        'gflops': kind.total(cfg) / seconds / 1e9,
        'memory_bytes': kind.memory_bytes,
        'programs': kind.programs,
        **differences[kind.name],
      }
    )
  seconds = {row['rows']: row['seconds'] for row in rows}
  for row in rows:
    for name, of in ('over_single', 'a'), ('over_appended', 'b'):
      row[name] = seconds[of] / row['seconds'] if of in seconds else None
    row['of_ideal'] = rows[0]['seconds'] / row['seconds'] / row['ideal']
  return rows


def base_tokens(samples) -> int:
  return sum(len(s.tokens) for s in samples)


def pairs(kind: Kind) -> int:
  return sum(o.pairs for o in kind.operations)


def compare(runner: Runner, found, num_samples: int) -> dict[str, dict]:
  """Loss and gradient of each kind against (a)'s, on the completions that (a) ran."""
  base, others = found[0], found[1:]
  factor = np.zeros(num_samples + 1, np.float32)  # the last one is for padding
  for i in base.chosen:
    factor[base.batches[i].term_sample] = 1
  factor[-1] = 0
  all_ran = bool(factor[:-1].all())
  want = base.sums
  out = {base.name: {'d_loss': 0.0, 'd_grad': 0.0}}
  for kind in others:
    if len(kind.chosen) < len(kind.batches):
      out[kind.name] = {'d_loss': None, 'd_grad': None}
      continue
    got = kind.sums if all_ran else runner.run(kind, kind.chosen, factor)
    leaves = jax.tree.map(
      lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), got[0], want[0]
    )
    out[kind.name] = {
      'd_loss': abs(float(got[1]['loss'] - want[1]['loss'])),
      'd_grad': max(jax.tree.leaves(leaves)),
    }
  return out


COLUMNS = {
  'workload': ('workload', '{}'),
  'rows': ('rows', '({})'),
  'input_tokens': ('input tokens', '{:,}'),
  'tokens': ('forest tokens', '{:,}'),
  'compression': ('compression', '{:.2f}'),
  'pairs_ratio': ('pairs ratio', '{:.2f}'),
  'batches': ('batches run', '{}'),
  'seconds': ('step s', '{:.2f}'),
  'over_appended': ('over (b)', '{:.2f}'),
  'over_single': ('over (a)', '{:.2f}'),
  'ideal': ('ideal', '{:.2f}'),
  'of_ideal': ('÷ ideal', '{:.2f}'),
  'gflops': ('GFLOP/s', '{:.0f}'),
  'memory_bytes': ('peak MB', '{:.0f}'),
  'd_loss': ('max Δloss', '{:.1e}'),
  'd_grad': ('max rel Δgrad', '{:.1e}'),
  'programs': ('compilations', '{}'),
}
GROUPS = {
  'What is computed': (
    'input tokens', 'forest tokens', 'compression', 'pairs ratio', 'batches run',
    'compilations',
  ),
  'How fast, and in how much memory': (
    'step s', 'over (b)', 'over (a)', 'ideal', '÷ ideal', 'GFLOP/s', 'peak MB',
  ),
  'Differences from the first rows': ('max Δloss', 'max rel Δgrad'),
}  # fmt: skip


def show(rows: list[dict]) -> None:
  lines = []
  for row in rows:
    values = dict(row, memory_bytes=row['memory_bytes'] / 1e6)
    lines.append(
      [
        '' if values[name] is None else form.format(values[name])
        for name, (_, form) in COLUMNS.items()
      ]
    )
  head = [title for title, _ in COLUMNS.values()]
  print(harness.markdown(head, lines, GROUPS), flush=True)


def merge_speed(rounds: int, clock):
  """Yields tokens per second of `merge` and `cut` on groups that share 90 %."""
  rng = np.random.default_rng(0)
  for count, length in ((16, 100_000), (64, 100_000), (256, 25_000), (1024, 4_000)):
    stem = rng.integers(0, 200_000, length * 9 // 10).astype(np.int32)
    samples = [
      forest.Sample(
        np.concatenate([stem, rng.integers(0, 200_000, length - len(stem))]).astype(
          np.int32
        ),
        len(stem),
      )
      for _ in range(count)
    ]
    seconds = collections.defaultdict(list)
    for _ in range(rounds):
      started = clock()
      tree = forest.merge(samples)
      seconds['merge'].append(clock() - started)
      started = clock()
      for _ in forest.cut(tree, forest.Buckets((4096,), (131_072,))):
        pass
      seconds['cut'].append(clock() - started)
    tokens = count * length
    rates = {f'{k}_tokens_per_s': tokens / np.median(v) for k, v in seconds.items()}
    yield {'samples': count, 'length': length, **rates}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  names = list(workloads.WORKLOADS)
  what = parser.add_mutually_exclusive_group()
  what.add_argument('--workloads', nargs='+', choices=names, default=names)
  what.add_argument('--pool', nargs='+', type=pathlib.Path, default=[], metavar='RUN')
  parser.add_argument('--groups', type=int, default=8, help='of each RUN, in its order')
  parser.add_argument('--kinds', nargs='+', default=list('abcdef'))
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--limit_s', type=float, default=600.0)
  parser.add_argument('--batch_tokens', type=int, default=4096)
  parser.add_argument('--row_tokens', type=int, default=4096, help='of (b) and (f)')
  parser.add_argument('--clock', choices=CLOCKS, default='wall')
  parser.add_argument('--scale', type=float, default=1.0, help='factor of every length')
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--mtp_modules', type=int, default=0)
  parser.add_argument(
    '--keep_memory',
    action=argparse.BooleanOptionalAction,
    default=True,
    help='keep freed memory, as the jobs do',
  )
  parser.add_argument('--merge', action='store_true', help='time forest.merge only')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  if args.keep_memory:
    startup.keep_freed()
  if args.merge:
    for row in merge_speed(args.rounds, CLOCKS[args.clock]):
      print(json.dumps(row), flush=True)
    return
  if args.dtype == 'float64':
    jax.config.update('jax_enable_x64', True)
  cfg = prefix_tree_rows.small(args.dtype, args.mtp_modules)
  vocab, scale = cfg.vocab_size, args.scale
  try:
    chosen = [(run.name, workloads.recorded(run, args.groups)) for run in args.pool]
  except ValueError as error:
    parser.error(f'--pool: {error}')
  if not args.pool:
    chosen = [(name, workloads.make(name, vocab, scale)) for name in args.workloads]
  found = []
  for name, trajectories in chosen:
    rows = measure(name, trajectories, args, cfg)
    found += rows
    if not args.json:
      show(rows)
  if args.json:
    print(json.dumps({**vars(args), 'rows': found}, indent=2, default=str))


if __name__ == '__main__':
  main()
