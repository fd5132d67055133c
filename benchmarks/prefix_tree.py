"""What prefix-tree merging gains: the same loss and gradient from fewer tokens.

  python -m benchmarks.prefix_tree                          # the whole table
  python -m benchmarks.prefix_tree --workloads terminal --rounds 3
  python -m benchmarks.prefix_tree --merge                  # how fast `merge` itself is

A figure is one gradient of one batch: forward and backward of every row, without the
optimizer's update, which is the same for all. Rows:

  (a) one row per completion, dense causal, at its own length rounded up to 128
  (b) append-only merge: completions of a trajectory that continue each other, one row
  (c) the common prompt shared, everything after it apart
  (d) the prefix tree in one row
  (e) the prefix tree in chunks of up to a quarter, by push and pop

Rows of one shape run together, up to --batch_tokens. Times are medians over rounds in
which all kinds take turns. Where a kind would take more than --limit_s, so many of its
batches are run, evenly spaced, and the time scaled by counted operations. Ideal is the
ratio of counted operations on tokens without padding: matmuls and visible pairs, both
sides with the same attention; (e)'s counts its second forward pass.

Expert ids are recorded once and replayed by all (law 3). Differences are to (a) on
those completions that were run, the other completions' weights being 0.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from benchmarks import prefix_tree_workloads as workloads
from m2jax import config as model_config
from m2jax import forest, model
from m2jax.rl import learner
from m2jax.train import chunks, feeds
from m2jax.train import step as train_step

OBJECTIVE = functools.partial(learner.objective, is_weight_max=5.0)
STEP = train_step.StepConfig()
ROUND = 128  # rows are padded to multiples of
# CPU seconds of this process hardly depend on what else runs, unlike wall time.
CLOCKS = {'wall': time.monotonic, 'cpu': time.process_time}


def small(dtype: str, mtp_modules: int = 0) -> model_config.ModelConfig:
  """13.5M parameters: large enough that two cores compute most of the time."""
  return model_config.ModelConfig(
    vocab_size=512,
    num_layers=4,
    embed_dim=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rotary_dim=16,
    num_experts=32,
    experts_per_token=4,
    expert_dim=128,
    num_mtp_modules=mtp_modules,
    dtype=dtype,
    param_dtype='float64' if dtype == 'float64' else 'float32',
  )


@dataclasses.dataclass(frozen=True)
class Operations:
  """Counted operations of a gradient, in units of one forward multiply-add pair."""

  tokens: int
  pairs: int
  again_tokens: int = 0  # forward once more
  again_pairs: int = 0

  def flops(self, cfg) -> float:
    d, f, h = cfg.embed_dim, cfg.expert_dim, cfg.num_heads * cfg.head_dim
    kv = cfg.num_kv_heads * cfg.head_dim
    layer = d * (2 * h + 2 * kv + cfg.num_experts) + 3 * cfg.experts_per_token * d * f
    blocks = cfg.num_layers + cfg.num_mtp_modules
    token = blocks * layer + (1 + cfg.num_mtp_modules) * d * cfg.vocab_size
    token += cfg.num_mtp_modules * 2 * d * d
    pair = blocks * 2 * h
    # a matmul's backward is two, of attention's two products it is five
    forward = 2 * (token * self.again_tokens + pair * self.again_pairs)
    return 2 * (3 * token * self.tokens + 3.5 * pair * self.pairs) + forward


def count(batch: forest.Forest) -> Operations:
  """Of a forest's tokens; a token at depth p sees p + 1 keys."""
  live = batch.subtree_end > 0
  return Operations(int(live.sum()), int((batch.position[live] + 1).sum()))


class Kind:
  """One way to run a workload.

  Attributes:
    batches: forests, or plans of (e).
    chosen: indices of the batches that are run.
    sums: what the last run of them gave.
    operations: of each batch.
    tokens: without padding; padded: with.
  """

  def __init__(self, name: str, batches: list, operations: list[Operations]):
    self.name, self.batches, self.operations = name, batches, operations
    self.tokens = sum(o.tokens for o in operations)
    self.chosen = list(range(len(batches)))
    self.seconds: list[float] = []
    self.sums = None
    self.programs = 0
    self.memory_bytes = 0

  def total(self, cfg, chosen=None) -> float:
    chosen = range(len(self.batches)) if chosen is None else chosen
    return sum(self.operations[i].flops(cfg) for i in chosen)


def pad_to(batch: forest.Forest, terms: int) -> list[forest.Forest]:
  """Rows at their own lengths rounded up to 128."""
  longest = batch.tokens.shape[1]
  sizes = [*range(ROUND, longest + ROUND, ROUND)]
  return forest.by_bucket(batch, sizes, [terms])


def in_batches(forests, batch_tokens: int) -> list[forest.Forest]:
  """Rows of one shape together, up to `batch_tokens` tokens."""
  out = []
  for batch in forests:
    rows = max(1, batch_tokens // batch.tokens.shape[1])
    out += feeds.micro_batches(batch, min(rows, len(batch.tokens)))
  return out


def power(n: int) -> int:
  return 1 << max(0, n - 1).bit_length()


def single_rows(samples, batch_tokens):
  """(a): a forest for each length; terms padded to one size."""
  terms = power(max(len(s.tokens) - s.prompt_length for s in samples))
  by_length = collections.defaultdict(list)
  for index, sample in enumerate(samples):
    by_length[-(-len(sample.tokens) // ROUND) * ROUND].append((index, sample))
  out = []
  for length, members in sorted(by_length.items()):
    parts = [
      renamed(forest.merge([s], row_tokens=length, row_terms=terms), [i])
      for i, s in members
    ]
    out += in_batches([stacked(parts)], batch_tokens)
  return out


def stacked(parts) -> forest.Forest:
  return jax.tree.map(lambda *a: np.concatenate(a), *parts)


def renamed(batch: forest.Forest, indices) -> forest.Forest:
  """The batch with its samples' places in `indices` as their numbers."""
  names = np.append(indices, -1)  # padding stays -1
  return dataclasses.replace(
    batch, term_sample=names[batch.term_sample].astype(np.int32)
  )


def appended_rows(trajectories, batch_tokens):
  """(b): a new row where a completion does not continue the one before."""
  rows, index = [], 0
  for trajectory in trajectories:
    for sample in trajectory:
      last = rows[-1][-1][1].tokens if rows and sample is not trajectory[0] else None
      if last is not None and np.array_equal(sample.tokens[: len(last)], last):
        rows[-1].append((index, sample))
      else:
        rows.append([(index, sample)])
      index += 1
  parts = [
    renamed(forest.merge([s for _, s in row]), [i for i, _ in row]) for row in rows
  ]
  return from_rows(parts, batch_tokens)


def from_rows(parts, batch_tokens):
  """Forests of one row each → few shapes."""
  terms = power(max(p.weight.shape[1] for p in parts))
  by_shape = collections.defaultdict(list)
  for part in parts:
    (cut,) = pad_to(part, terms)
    by_shape[cut.tokens.shape[1]].append(cut)
  return in_batches([stacked(p) for _, p in sorted(by_shape.items())], batch_tokens)


def shared_prompt_rows(samples, vocab, row_tokens):
  """(c): what all completions have in common once a row, the rest apart."""
  first, last = (f(tuple(s.tokens.tolist()) for s in samples) for f in (min, max))
  shared = next(
    (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
    min(len(first), len(last)),
  )
  shared = min(shared, min(s.prompt_length for s in samples))
  apart = []
  for i, sample in enumerate(samples):  # ids that no other completion has
    tokens = sample.tokens.copy()
    tokens[shared:] += vocab * (i + 1)
    apart.append(dataclasses.replace(sample, tokens=tokens))
  longest = max(len(s.tokens) for s in samples)
  batch = forest.merge(apart, row_tokens=max(row_tokens, longest))
  batch = dataclasses.replace(batch, tokens=batch.tokens % vocab)
  return in_batches(pad_to(batch, power(batch.weight.shape[1])), 1)


def kinds(trajectories, cfg, args) -> list[Kind]:
  samples = [s for trajectory in trajectories for s in trajectory]
  terms = sum(len(s.tokens) - s.prompt_length for s in samples)
  weights = [
    np.full(len(s.tokens) - s.prompt_length, 1 / terms, np.float32) for s in samples
  ]
  samples = [
    dataclasses.replace(s, weights=w) for s, w in zip(samples, weights, strict=True)
  ]
  tree = forest.merge(samples)
  samples = with_experts(samples, tree, cfg)
  again = iter(samples)
  trajectories = [[next(again) for _ in trajectory] for trajectory in trajectories]
  tree = forest.merge(samples)
  tokens = tree.tokens.shape[1]
  (row,) = pad_to(tree, power(tree.weight.shape[1]))
  found = [
    ('a', single_rows(samples, args.batch_tokens)),
    ('b', appended_rows(trajectories, args.batch_tokens)),
    ('c', shared_prompt_rows(samples, cfg.vocab_size, tokens)),
    ('d', [row]),
  ]
  out = [Kind(name, batches, [count(b) for b in batches]) for name, batches in found]
  quarter = -(-tokens // (4 * ROUND)) * ROUND
  longest = int(tree.position.max()) + 1
  sizes = forest.sizes(-(-quarter // (4 * ROUND)) * ROUND, quarter)
  stacks = forest.sizes(sizes[0], -(-longest // sizes[0]) * sizes[0])
  plan = forest.cut(tree, forest.Buckets(sizes, stacks))
  whole = count(tree)
  core = tree.subtree_end[0] - np.arange(tokens) > quarter
  again = Operations(
    whole.tokens,
    whole.pairs,
    plan.trunk_tokens,
    int((tree.position[0][core] + 1).sum()),
  )
  return [*out, Kind('e', [plan], [again])]


def with_experts(samples, tree, cfg):
  """The samples with the expert ids that the model chooses on the tree."""
  variables = variables_of(cfg)
  (row,) = pad_to(tree, power(tree.weight.shape[1]))
  ids = jax.jit(lambda v, b: model.forward(cfg, v, b).experts)(variables, row)
  ids, parent = np.asarray(ids[0]), tree.parent[0]
  ends = np.zeros(len(samples), np.int64)
  np.maximum.at(ends, tree.term_sample[0], tree.term_token[0])
  out = []
  for sample, end in zip(samples, ends, strict=True):
    path = np.zeros(len(sample.tokens), np.int64)
    for i in range(len(path) - 1, -1, -1):
      path[i], end = end, parent[end]
    out.append(dataclasses.replace(sample, experts=ids[path]))
  return out


@functools.cache
def variables_of(cfg):
  return train_step.init_variables(cfg, jax.random.key(0))


class Runner:
  """Compiles, runs and compares the kinds of one workload."""

  def __init__(self, cfg):
    self.cfg = cfg
    self.variables = variables_of(cfg)
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
    """Sums over the chosen batches; `weights` is a factor by sample."""
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
    """Runs each shape once, so that no later run compiles; sets what it needed."""
    if kind.name == 'e':
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
    """Of the largest chunk program: arguments, stack among them, and temporaries."""
    most = 0
    size = plan.buckets.stack_tokens[-1] + plan.buckets.chunk_tokens[-1]
    done = set()
    for chunk in plan:
      if chunk.kind == 'push' or chunk.shape in done:
        continue
      done.add(chunk.shape)
      slots = size if chunk.shape[2] or chunk.kind == 'pop' else 0
      stack = model.empty_prefix(self.cfg, 1, slots)
      sums = self.parts.zeros(self.variables, chunk.batch)
      args = (self.variables, sums, stack, stack, chunk.batch)
      if chunk.kind == 'pop':
        args += (chunk.start,)
      lowered = getattr(self.parts, chunk.kind).lower(*args)
      most = max(most, _bytes(lowered.compile()))
    return most


def _bytes(program) -> int:
  m = program.memory_analysis()
  return (
    m.temp_size_in_bytes
    + m.argument_size_in_bytes
    + m.output_size_in_bytes
    - (m.alias_size_in_bytes)
  )


def masked(batch: forest.Forest, factor: np.ndarray) -> forest.Forest:
  """The batch with each term's weight times the factor of its sample."""
  return dataclasses.replace(batch, weight=batch.weight * factor[batch.term_sample])


def choose(kind: Kind, rate: float, limit_s: float, cfg) -> None:
  """Evenly spaced batches that take about limit_s at `rate` operations per second."""
  n = len(kind.batches)
  share = min(1.0, limit_s * rate / kind.total(cfg))
  m = max(1, min(n, int(n * share)))
  kind.chosen = [int((i + 0.5) * n / m) for i in range(m)]


def measure(name: str, args, cfg) -> list[dict]:
  """One dict per kind of rows."""
  trajectories = workloads.make(name, cfg.vocab_size, args.scale)
  found = [k for k in kinds(trajectories, cfg, args) if k.name in args.kinds]
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
  for row in rows:
    row['speedup'] = rows[0]['seconds'] / row['seconds']
    row['of_ideal'] = row['speedup'] / row['ideal']
  return rows


def base_tokens(samples) -> int:
  return sum(len(s.tokens) for s in samples)


def pairs(kind: Kind) -> int:
  return sum(o.pairs for o in kind.operations)


def compare(runner: Runner, found, num_samples: int) -> dict[str, dict]:
  """Loss and gradient of each kind against (a)'s, on the completions that (a) ran."""
  base, others = found[0], found[1:]
  factor = np.zeros(num_samples + 1, np.float32)  # the last is padding's
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
  'speedup': ('speed-up', '{:.2f}'),
  'ideal': ('ideal', '{:.2f}'),
  'of_ideal': ('÷ ideal', '{:.2f}'),
  'gflops': ('GFLOP/s', '{:.0f}'),
  'memory_bytes': ('peak MB', '{:.0f}'),
  'd_loss': ('max Δloss', '{:.1e}'),
  'd_grad': ('max rel Δgrad', '{:.1e}'),
  'programs': ('compilations', '{}'),
}


def show(rows: list[dict]) -> None:
  print('| ' + ' | '.join(title for title, _ in COLUMNS.values()) + ' |')
  print('|---' * len(COLUMNS) + '|')
  for row in rows:
    values = dict(row, memory_bytes=row['memory_bytes'] / 1e6)
    cells = (
      '' if values[name] is None else form.format(values[name])
      for name, (_, form) in COLUMNS.items()
    )
    print('| ' + ' | '.join(cells) + ' |', flush=True)


def merge_speed(rounds: int, clock):
  """Yields tokens per second of `merge` and `cut` on groups that share 90 %."""
  rng = np.random.default_rng(0)
  for count_, length in ((16, 100_000), (64, 100_000), (256, 25_000), (1024, 4_000)):
    stem = rng.integers(0, 200_000, length * 9 // 10).astype(np.int32)
    samples = [
      forest.Sample(
        np.concatenate([stem, rng.integers(0, 200_000, length - len(stem))]).astype(
          np.int32
        ),
        len(stem),
      )
      for _ in range(count_)
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
    tokens = count_ * length
    rates = {f'{k}_tokens_per_s': tokens / np.median(v) for k, v in seconds.items()}
    yield {'samples': count_, 'length': length, **rates}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  names = list(workloads.WORKLOADS)
  parser.add_argument('--workloads', nargs='+', choices=names, default=names)
  parser.add_argument('--kinds', nargs='+', default=list('abcde'))
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--limit_s', type=float, default=600.0)
  parser.add_argument('--batch_tokens', type=int, default=4096)
  parser.add_argument('--clock', choices=CLOCKS, default='wall')
  parser.add_argument('--scale', type=float, default=1.0, help='of every length')
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--mtp_modules', type=int, default=0)
  parser.add_argument('--merge', action='store_true', help='time forest.merge only')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  logging.set_verbosity(logging.INFO)
  if args.merge:
    for row in merge_speed(args.rounds, CLOCKS[args.clock]):
      print(json.dumps(row), flush=True)
    return
  if args.dtype == 'float64':
    jax.config.update('jax_enable_x64', True)
  cfg = small(args.dtype, args.mtp_modules)
  found = []
  for name in args.workloads:
    rows = measure(name, args, cfg)
    found += rows
    if not args.json:
      show(rows)
  if args.json:
    print(json.dumps({**vars(args), 'rows': found}, indent=2))


if __name__ == '__main__':
  main()
