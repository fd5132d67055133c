"""Shares of the roofline that kernels reach, derived from published v5p runs.

A step's estimate divides the parts of its bound by these shares:

  attention  the kernel's matmuls. Published: Llama 3.1 8B at 4M tokens, whose step is
             98 % kernel, with heads of 256 channels. The loss there is attributed to
             the softmax, which doubles at M2's 128.
  matmul     projections and head. Published: Mixtral 8x7B, whose experts are as large
             and as full as dense matmuls.
  experts    grouped matmuls of many small experts, with what sorts their rows.
             Published: DeepSeek-V3, 256 experts of 2,048 channels.
  hbm, links assumed: nothing published separates them.

Each of the first three is solved for, so that the formula gives the published tokens/s;
the three runs therefore cannot validate it. `spread` shows how far apart they are: what
DeepSeek-V3 would reach with Mixtral's share. Published runs are counted like the plan,
padding of tiles included. The formula has the FLOPs of `flops`, the HBM bytes of the
experts' rows, and no collectives (those runs hide them, or lose in `experts`).

Sources: tokens/s and settings from AI-Hypercomputer/tpu-recipes, training/v5p
(Mixtral-8X7B-Maxtext, DeepSeek3-671B-MaxText, Llama3.1-8B-LongContext-Maxtext) and
maxtext, docs/reference/models/tiering.md; sizes from maxtext's configs/models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from m2jax.config import ModelConfig
from m2jax.plan import flops
from m2jax.plan.chips import Chip, of_kind

# [T·k, D] arrays that XLA's instructions read or write beside the kernels of a block's
# experts: forward (and recomputed), backward. Of pretrain_8k as it is compiled.
ROW_ARRAYS = (7, 12)


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """Shares of the roof, each in (0, 1]; see the module's docstring."""

  attention: float
  matmul: float
  experts: float
  hbm: float
  links: float


ROOF = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0)
_HBM, _LINKS = 0.8, 0.8
_MEGABLOX_ROWS = 512  # of a tile of DeepSeek-V3's run (facts/jax-anchors.md §2.3)


@dataclasses.dataclass(frozen=True)
class Run:
  """A published run.

  Attributes:
    name: the model and the slice.
    tokens: tokens of a step, on one chip.
    tokens_per_s: the published rate of one chip.
    core, matmul, experts: FLOPs that a step executes on one chip.
    hbm_bytes: bytes of the experts' rows.
    head_dim: head dim of attention.
  """

  name: str
  tokens: int
  tokens_per_s: float
  core: float
  matmul: float
  experts: float
  hbm_bytes: float
  head_dim: int

  def seconds(self, share: Efficiency, chip: Chip) -> float:
    """Time of a step."""
    products = self.core / _of_heads(share.attention, self.head_dim)
    products += self.matmul / share.matmul + self.experts / share.experts
    moved = self.hbm_bytes / share.hbm
    return products / chip.peak_flops + moved / chip.hbm_bandwidth


def _of_heads(share: float, head_dim: int) -> float:
  """Attention's share at 128 channels → at `head_dim`."""
  return 1 / (1 + (1 / share - 1) * 128 / head_dim)


def mixtral() -> Run:
  """Mixtral 8x7B, 8x4x4: 36 rows of 4,096 tokens, everything recomputed."""
  cfg = ModelConfig(
    vocab_size=32_000,
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rotary_dim=128,
    num_experts=8,
    experts_per_token=2,
    expert_dim=14_336,
    num_mtp_modules=0,
    remat='layer',
  )
  tokens = 36 * 4096
  part = flops.Local(36, 4096, (4096,), 32, 8, 8, 14_336, 32_000, 2 * tokens)
  stages, core = (f(cfg, part, 128, True) for f in (flops.executed, flops.core))
  total: dict[str, float] = dict.fromkeys(('attention', 'moe', 'rest'), 0.0)
  for (_, name), count in stages.items():
    total[name] += count
  attention = sum(core.values())
  arrays = 2 * ROW_ARRAYS[0] + ROW_ARRAYS[1]
  return Run(
    'Mixtral 8x7B, 8x4x4',
    tokens,
    2909.0,
    attention,
    # large experts: dense matmuls
    total['attention'] - attention + total['rest'] + total['moe'],
    0.0,
    cfg.num_layers * arrays * 2.0 * part.expert_tokens * cfg.embed_dim,
    128,
  )


def deepseek() -> Run:
  """DeepSeek-V3, 8x8x8: 6 rows of 8,192 tokens; all but attention's output projection
  is recomputed. Multi-head latent attention and shared experts by formula.

  Experts are megablox's: E groups of rows that begin anywhere are in R/512 + E − 1
  visits of tiles of 512 rows, each multiplied whole. The share of experts is applied to
  FLOPs that have M2's padding (`flops.layer`), so it is solved from FLOPs that have the
  run's own.
  """
  layers, dense, D, V, heads = 61, 3, 7168, 129_280, 128
  q_rank, kv_rank, nope, rope, v_dim = 1536, 512, 128, 64, 128
  F, E, k, tokens, row = 2048, 256, 8, 6 * 8192, 8192
  up = flops.product
  q = up(1, D, q_rank) + up(1, q_rank, heads * (nope + rope))
  kv = up(1, D, kv_rank + rope) + up(1, kv_rank, heads * (nope + v_dim))
  out = up(1, heads * v_dim, D)
  part = flops.Local(1, row, (row,), heads, heads, E, F, V, 0)
  pairs = flops.pairs(part, 2048) / row  # blocks of 2,048
  qk = flops.up(nope + rope, 128)  # as the matrix unit has them
  core = heads * 2 * (qk + v_dim) * pairs
  mlp = dense * 3 * up(1, D, 18_432) + (layers - dense) * (
    3 * up(1, D, F) + up(1, D, E)
  )
  forward = layers * (q + kv + out) + mlp
  matmul = 4 * forward - layers * out + (2 + 2) * up(1, D, V)
  expert_rows = tokens * k + (E - 1) * _MEGABLOX_ROWS
  arrays = 2 * ROW_ARRAYS[0] + ROW_ARRAYS[1]
  return Run(
    'DeepSeek-V3, 8x8x8',
    tokens,
    542.1,
    tokens * layers * core * (1 + 1 + 3.5),
    tokens * matmul,
    expert_rows * (layers - dense) * 4 * 3 * up(1, D, F),
    (layers - dense) * arrays * 2.0 * tokens * k * D,
    128,
  )


def llama() -> Run:
  """Llama 3.1 8B, 4x4x4: 2 rows of 4,194,304 tokens on 64 chips; 16 heads of 256,
  attention's output is saved, its backward kernel is fused: 5 products."""
  layers, D, F, V, keys, row = 32, 4096, 14_336, 128_256, 1024, 4_194_304
  tokens = 2 * row // 64
  up = flops.product
  block = 2 * up(1, D, D) + 2 * up(1, D, keys) + 3 * up(1, D, F)
  forward = 2 * 2 * D * row / 2
  return Run(
    'Llama 3.1 8B at 4M tokens, 4x4x4',
    tokens,
    tokens / 1373.73,
    tokens * layers * forward * (2 + 5) / 2,
    tokens * (4 * layers * block + 3 * up(1, D, V)),
    0.0,
    0.0,
    256,
  )


# What each share is solved from.
RUNS = {'attention': llama(), 'matmul': mixtral(), 'experts': deepseek()}


def fit(chip: Chip) -> Efficiency:
  """The shares at which the formula gives the published tokens/s of the three runs."""
  share = dataclasses.replace(ROOF, hbm=_HBM, links=_LINKS)
  for _ in range(4):  # each depends a little on the others
    for field, run in RUNS.items():
      share = dataclasses.replace(share, **{field: _solve(run, field, share, chip)})
  return share


def _solve(run: Run, field: str, share: Efficiency, chip: Chip) -> float:
  """The share of `field` at which the run has its published speed."""
  low, high = 0.05, 1.0
  for _ in range(50):
    middle = (low + high) / 2
    seconds = run.seconds(dataclasses.replace(share, **{field: middle}), chip)
    slow = seconds > run.tokens / run.tokens_per_s
    low, high = (middle, high) if slow else (low, middle)
  return (low + high) / 2


def spread(chip: Chip, share: Efficiency) -> Mapping[str, float]:
  """Run → tokens/s over the published ones, if all matmuls had Mixtral's share."""
  same = dataclasses.replace(share, experts=share.matmul)
  return {
    run.name: run.tokens / run.seconds(same, chip) / run.tokens_per_s
    for run in RUNS.values()
  }


V5P = of_kind('TPU v5')
CALIBRATED = fit(V5P)
