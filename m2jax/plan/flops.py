"""FLOPs of one device, counted by hand: the compiler does not see inside kernels.

Two counts. *Executed* FLOPs are those of the matrix unit: sides of a matmul padded to
its side, the fp32 logits of head and router as two products (`kernels.fp32`), partly
masked blocks of attention and an expert's last chunk of rows counted whole, the
recomputation, and twice the forward pass for the backward pass (attention's kernels: 7
products for the forward's 2). *Useful* FLOPs are the model's: no padding, no
recomputation, half of a square for causal attention, three times the forward pass for a
step. A product of an m x k and a k x n matrix is 2·m·k·n.

Rows are chains of `context` tokens, the most expensive forests of this shape, and all
experts get the same number of tokens.

Axes: T tokens of a device, D model, N, K heads, H head dim, E experts, F expert hidden,
V vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from m2jax.config import ModelConfig
from m2jax.kernels import block_sizes
from m2jax.sharding import Sharding

Stages = Mapping[tuple[str, str], float]

_FP32 = 2  # products of bf16 that make one of bf16 activations with fp32 weights


@dataclasses.dataclass(frozen=True)
class Local:
  """Sizes of one device's part of a pass.

  Attributes:
    rows, queries: its rows, and its tokens of each.
    ends: its tokens of a row are runs of equal length; of each run, the number of keys
      that the last token sees.
    heads, kv_heads, experts, expert_dim, vocab: its part of the model.
    expert_tokens: assignments to its experts, if all experts have the same number.
  """

  rows: int
  queries: int
  ends: tuple[int, ...]
  heads: int
  kv_heads: int
  experts: int
  expert_dim: int
  vocab: int
  expert_tokens: int

  @property
  def tokens(self) -> int:
    """T."""
    return self.rows * self.queries


def local(
  cfg: ModelConfig, where: Sharding, rows: int, new_tokens: int, keys: int
) -> Local:
  """One device's part of a pass of `rows` rows, each with `new_tokens` new tokens of
  which the last sees `keys` keys."""
  heads = where.size('heads')
  queries = new_tokens // where.size('tokens')
  ends = (keys,)
  if queries < new_tokens:  # the first device's runs; others' see the same number
    ends = (keys - new_tokens + queries // 2, keys)
  part_rows = max(rows // where.size('rows'), 1)
  return Local(
    rows=part_rows,
    queries=queries,
    ends=ends,
    heads=cfg.num_heads // heads,
    kv_heads=max(cfg.num_kv_heads // heads, 1),
    experts=cfg.num_experts // where.size('experts'),
    expert_dim=cfg.expert_dim // where.size('expert_hidden'),
    vocab=cfg.vocab_size // where.size('vocab'),
    expert_tokens=part_rows * queries * cfg.experts_per_token,
  )


def up(n: int, to: int) -> int:
  """n rounded up to a multiple of `to`."""
  return -(-n // to) * to


def product(m: int, k: int, n: int, mxu: int = 1) -> float:
  """FLOPs of [m, k] x [k, n], sides padded to `mxu`."""
  return 2.0 * up(m, mxu) * up(k, mxu) * up(n, mxu)


def pairs(part: Local, block: int = 1) -> float:
  """Query-key pairs of a row that are computed, in whole blocks.

  Block 1 counts exactly the pairs that are seen.
  """
  count = part.queries // len(part.ends)
  return sum(_pairs(count, end, block) for end in part.ends)


def _pairs(queries: int, keys: int, block: int) -> float:
  first = keys - queries
  if block == 1:
    return queries * (first + (queries + 1) / 2)
  block_q, block_k = min(block, up(queries, 128)), min(block, up(keys, 128))
  total = 0
  for start in range(0, queries, block_q):
    last = min(first + start + block_q, keys)
    total += block_q * up(last, block_k)
  return float(total)


def layer(
  cfg: ModelConfig, part: Local, mxu: int = 1, padded: bool = True
) -> Mapping[str, float]:
  """part → FLOPs of one block's forward pass; attention's core apart, as 'core', and
  the router, as one product."""
  D, H, T = cfg.embed_dim, cfg.head_dim, part.tokens
  mxu = mxu if padded else 1
  kv = part.kv_heads * H
  projections = product(T, D, part.heads * H, mxu) + 2 * product(T, D, kv, mxu)
  projections += product(T, part.heads * H, D, mxu)
  block = block_sizes.get('tpu', 'tree_attention')['tokens'] if padded else 1
  core = part.rows * part.heads * 2 * 2 * H * pairs(part, block)
  if padded and part.queries == 1:  # decoding: a group's queries are one side
    group = part.heads // part.kv_heads
    core = part.rows * part.kv_heads * 2 * product(group, H, part.ends[0], mxu)
  rows = part.expert_tokens
  if padded:  # an expert's rows begin and end anywhere in a chunk
    chunk = block_sizes.get('tpu', 'grouped_matmul')['chunk']
    rows += min(part.experts, rows) * (chunk - 1)
  experts = 3 * product(rows, D, part.expert_dim, 1 if not padded else mxu)
  router = product(T, D, cfg.num_experts, mxu)
  return dict(attention=projections, core=core, experts=experts, router=router)


def executed(cfg: ModelConfig, part: Local, mxu: int, training: bool) -> Stages:
  """(pass, part) → FLOPs that the matrix unit does in one pass over the batch."""
  one = layer(cfg, part, mxu)
  attention, moe = (
    one['attention'] + one['core'],
    one['experts'] + _FP32 * one['router'],
  )
  head = product(part.tokens, cfg.embed_dim, part.vocab, mxu)
  total: dict[tuple[str, str], float] = collections.defaultdict(float)
  if not training:
    total['forward', 'attention'] = cfg.num_layers * attention
    total['forward', 'moe'] = cfg.num_layers * moe
    last = dataclasses.replace(part, queries=1).tokens  # only the last is sampled from
    total['forward', 'rest'] = _FP32 * product(last, cfg.embed_dim, part.vocab, mxu)
    return dict(total)
  blocks = cfg.num_layers + cfg.num_mtp_modules
  join = cfg.num_mtp_modules * product(
    part.tokens, 2 * cfg.embed_dim, cfg.embed_dim, mxu
  )
  heads = (1 + cfg.num_mtp_modules) * head
  total['forward', 'attention'] = blocks * attention
  total['forward', 'moe'] = blocks * moe
  if cfg.remat != 'none':
    saved = one['core'] if cfg.remat == 'attention' else 0
    total['recompute', 'attention'] = blocks * (attention - saved)
    total['recompute', 'moe'] = blocks * moe
  total['backward', 'attention'] = blocks * (2 * one['attention'] + 3.5 * one['core'])
  total['backward', 'moe'] = blocks * 2 * (one['experts'] + one['router'])
  total['forward', 'rest'] = _FP32 * heads + join
  # logits are computed again
  total['backward', 'rest'] = (_FP32 + 2) * heads + 2 * join
  return dict(total)


def core(
  cfg: ModelConfig, part: Local, mxu: int, training: bool
) -> Mapping[str, float]:
  """pass → those of `executed`'s FLOPs of attention that its kernels do."""
  one = layer(cfg, part, mxu)['core'] * cfg.num_layers
  if not training:
    return {'forward': one}
  one *= 1 + cfg.num_mtp_modules / cfg.num_layers
  again = one if cfg.remat == 'layer' else 0.0
  return {'forward': one, 'recompute': again, 'backward': 3.5 * one}


def useful(cfg: ModelConfig, part: Local, training: bool) -> float:
  """The model's own FLOPs in one pass: of a step, three times the forward's."""
  one = sum(layer(cfg, part, padded=False).values())
  if not training:
    last = product(part.rows, cfg.embed_dim, part.vocab)
    return cfg.num_layers * one + last
  modules = cfg.num_mtp_modules
  head = (1 + modules) * product(part.tokens, cfg.embed_dim, part.vocab)
  join = modules * product(part.tokens, 2 * cfg.embed_dim, cfg.embed_dim)
  return 3 * ((cfg.num_layers + modules) * one + head + join)
