"""The settings of a scheduler."""

from __future__ import annotations

import dataclasses

from m2jax.checks import require
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.tiers.config import KvPoolConfig


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
  """How the engine thread divides its time.

  Attributes:
    decode_steps: steps per decode call; the host wakes once per call.
    prefill_budget_tokens: padded prompt tokens computed between two decode calls.
    gather_s: how long to wait for one more request before the next call, if the last
      one finished some or there was nothing to do (`Scheduler._gather`).
    reuse_stale_prefix: cached K/V of older weights may be reused (see scheduler.py).
    max_failures: consecutive failing steps after which the scheduler gives up.
    seed: seed of the random stream for requests without a seed.
    weights_part_bytes: bytes of new weights placed on a mesh between two decode calls.
    look_ahead: while the same sequences decode, without drafts, each call is made
      before the tokens of the one before are read.
    draft_tokens: tokens drafted in each step; None takes what is fastest, at most
      EngineConfig.draft_tokens (see drafting.py).
    host_cache_bytes: host memory for pages that leave the device cache; 0: none.
    kv_pool: a store of pages beyond host memory.
  """

  decode_steps: int = 8
  prefill_budget_tokens: int = 4096
  gather_s: float = 0.002
  reuse_stale_prefix: bool = False
  max_failures: int = 3
  seed: int = 0
  weights_part_bytes: int = 2**28
  look_ahead: bool = True
  draft_tokens: int | None = None
  host_cache_bytes: int = 0
  kv_pool: KvPoolConfig = KvPoolConfig()

  def __post_init__(self):
    for field in ('decode_steps', 'prefill_budget_tokens', 'weights_part_bytes'):
      require(self, getattr(self, field) >= 1, field, 'at least 1')
    require(self, self.host_cache_bytes >= 0, 'host_cache_bytes', 'at least 0')
    require(self, self.gather_s >= 0, 'gather_s', 'at least 0')
    if self.kv_pool.url:
      want = 'positive with kv_pool.url: its pages pass through host memory'
      require(self, self.host_cache_bytes > 0, 'host_cache_bytes', want)
      want = 'False with kv_pool.url, whose pages are of one version each'
      require(self, not self.reuse_stale_prefix, 'reuse_stale_prefix', want)

  def check(self, engine: EngineConfig) -> None:
    """Raises ValueError where this asks for more than the engine has compiled."""
    if self.decode_steps > engine.max_steps:
      raise ValueError(
        f'SchedulerConfig.decode_steps={self.decode_steps}: must be at most '
        f'EngineConfig.max_steps={engine.max_steps}'
      )
    most = engine.draft_tokens
    if self.draft_tokens is not None and not 0 <= self.draft_tokens <= most:
      raise ValueError(
        f'SchedulerConfig.draft_tokens={self.draft_tokens}: must be at most '
        f'EngineConfig.draft_tokens={most}, or None'
      )
