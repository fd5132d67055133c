"""Rows of the kinds (a) to (f) of benchmarks/prefix_tree.py, and their operations."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import numpy as np

from m2jax import config as model_config
from m2jax import forest, model
from m2jax.rl import packing
from m2jax.train import feeds
from m2jax.train import step as train_step

ROUND = 128  # rows are padded to multiples of this


def small(dtype: str, mtp_modules: int = 0) -> model_config.ModelConfig:
  """13.5M parameters: large enough that two CPU cores compute most of the time."""
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
  """Counts that determine the operations of a gradient.

  Attributes:
    tokens: tokens of the forward and backward pass.
    pairs: visible query-key pairs of it.
    again_tokens: tokens whose forward pass runs a second time.
    again_pairs: visible pairs of that second pass.
  """

  tokens: int
  pairs: int
  again_tokens: int = 0
  again_pairs: int = 0

  def flops(self, cfg) -> float:
    d, f, h = cfg.embed_dim, cfg.expert_dim, cfg.num_heads * cfg.head_dim
    kv = cfg.num_kv_heads * cfg.head_dim
    layer = d * (2 * h + 2 * kv + cfg.num_experts) + 3 * cfg.experts_per_token * d * f
    blocks = cfg.num_layers + cfg.num_mtp_modules
    token = blocks * layer + (1 + cfg.num_mtp_modules) * d * cfg.vocab_size
    token += cfg.num_mtp_modules * 2 * d * d
    pair = blocks * 2 * h
    # a matmul's backward is two matmuls; that of attention's two matmuls is five
    forward = 2 * (token * self.again_tokens + pair * self.again_pairs)
    return 2 * (3 * token * self.tokens + 3.5 * pair * self.pairs) + forward


def count(batch: forest.Forest) -> Operations:
  """Operations on a forest's tokens; a token at depth p sees p + 1 keys."""
  live = batch.subtree_end > 0
  return Operations(int(live.sum()), int((batch.position[live] + 1).sum()))


class Kind:
  """One way to run a workload.

  Attributes:
    batches: forests; for chunks, plans.
    operations: counted operations of each batch.
    tokens: tokens of all batches without padding.
    chosen: indices of the batches that are run.
    seconds: time of each round.
    sums: gradients and metrics that the last round returned.
    programs: number of compiled programs.
    memory_bytes: memory of the largest of them.
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
  """Splits a batch by row length, rounded up to a multiple of ROUND."""
  longest = batch.tokens.shape[1]
  sizes = [*range(ROUND, longest + ROUND, ROUND)]
  return forest.by_bucket(batch, sizes, [terms])


def in_batches(forests, batch_tokens: int) -> list[forest.Forest]:
  """Batches of rows of one shape, of up to `batch_tokens` tokens each."""
  out = []
  for batch in forests:
    rows = max(1, batch_tokens // batch.tokens.shape[1])
    out += feeds.micro_batches(batch, min(rows, len(batch.tokens)))
  return out


def power(n: int) -> int:
  """The smallest power of two that is at least n."""
  return 1 << max(0, n - 1).bit_length()


def single_rows(samples, batch_tokens):
  """(a): one row per completion, batched by length; terms padded to one size."""
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
  """The batch with sample i renumbered as indices[i]."""
  names = np.append(indices, -1)  # padding stays -1
  return dataclasses.replace(
    batch, term_sample=names[batch.term_sample].astype(np.int32)
  )


def appended_rows(trajectories, vocab, row_tokens):
  """(b): completions that continue each other once; such chains share rows."""
  samples, chains, last = [], [], None
  for trajectory in trajectories:
    for sample in trajectory:
      continues = last is not None and sample is not trajectory[0]
      continues = continues and np.array_equal(sample.tokens[: len(last)], last)
      chains.append(chains[-1] if continues else len(samples))
      samples.append(sample)
      last = sample.tokens
  return apart(samples, chains, 0, vocab, row_tokens)


def shared_prompt_rows(samples, vocab, row_tokens):
  """(c): the prefix common to all completions once per row, the rest separate."""
  first, last = (f(tuple(s.tokens.tolist()) for s in samples) for f in (min, max))
  shared = next(
    (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
    min(len(first), len(last)),
  )
  shared = min(shared, min(s.prompt_length for s in samples))
  return apart(samples, range(len(samples)), shared, vocab, row_tokens)


def apart(samples, keys, shared, vocab, row_tokens):
  """Rows in which samples of different keys share their first `shared` tokens only."""
  separate = []
  for key, sample in zip(keys, samples, strict=True):
    tokens = sample.tokens.copy()
    tokens[shared:] += vocab * (key + 1)
    separate.append(dataclasses.replace(sample, tokens=tokens))
  longest = max(len(s.tokens) for s in samples)
  batch = forest.merge(separate, row_tokens=max(row_tokens, longest))
  batch = dataclasses.replace(batch, tokens=batch.tokens % vocab)
  return in_batches(pad_to(batch, power(batch.weight.shape[1])), 1)


def kinds(trajectories, cfg, args) -> list[Kind]:
  """All kinds of rows for the same completions, weights and expert ids."""
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
    ('b', appended_rows(trajectories, cfg.vocab_size, args.row_tokens)),
    ('c', shared_prompt_rows(samples, cfg.vocab_size, tokens)),
    ('d', [row]),
  ]
  out = [Kind(name, batches, [count(b) for b in batches]) for name, batches in found]
  plan = forest.cut(tree, buckets(tree, -(-tokens // (4 * ROUND)) * ROUND))
  return [*out, Kind('e', [plan], [count_chunks(plan)]), packed(samples, tree, args)]


def buckets(tree: forest.Forest, chunk_tokens: int) -> forest.Buckets:
  """Chunks of up to `chunk_tokens`, and of a quarter of that; stacks for every path."""
  longest = int(tree.position.max()) + 1
  sizes = forest.sizes(-(-chunk_tokens // (4 * ROUND)) * ROUND, chunk_tokens)
  return forest.Buckets(
    sizes, forest.sizes(sizes[0], -(-longest // sizes[0]) * sizes[0])
  )


def count_chunks(plan: forest.Plan) -> Operations:
  """Operations of a plan; its trunk's forward pass runs twice."""
  tree, size = plan.tree, plan.buckets.chunk_tokens[-1]
  whole = count(tree)
  trunk = tree.subtree_end[0] - np.arange(tree.tokens.shape[1]) > size
  again_pairs = int((tree.position[0][trunk] + 1).sum())
  return Operations(whole.tokens, whole.pairs, plan.trunk_tokens, again_pairs)


def packed(samples, tree, args) -> Kind:
  """(f): as `rl.packing` chooses for rows and chunks of `args.row_tokens`."""
  batch = packing.pack(
    [samples],
    row_tokens=args.row_tokens,
    row_terms=power(4 * args.row_tokens),
    buckets=buckets(tree, args.row_tokens),
  )
  if batch.plan is not None:
    return Kind('f', [batch.plan], [count_chunks(batch.plan)])
  rows = in_batches([batch.rows], args.row_tokens)
  return Kind('f', rows, [count(row) for row in rows])


def with_experts(samples, tree, cfg):
  """The samples with the expert ids that the model chooses on their tree."""
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
