"""Settings of the router."""

from __future__ import annotations

import dataclasses
import math

from m2jax.checks import require
from m2jax.rollout.routing.policies import POLICIES


@dataclasses.dataclass(frozen=True)
class RouterConfig:
  """How requests are routed.

  Attributes:
    policy: a name of `policies.POLICIES`.
    observe_s: seconds between two looks at the replicas' statistics.
    max_attempts: replicas that a request is submitted to, one after the other, when
      they fail.
    max_restarts: consecutive failed restarts of a replica, the first after `restart_s`
      seconds, each later one after twice the wait.
    reuse_stale_prefix: as in the replicas' SchedulerConfig.
    migration_s: seconds to take a token's keys and values from a pool of pages that all
      replicas share, until it is measured; inf if there is none.
    seed: seed of the random stream for requests without a seed, and of the policy's.
  """

  policy: str = 'cost_aware'
  observe_s: float = 0.25
  max_attempts: int = 3
  max_restarts: int = 5
  restart_s: float = 1.0
  reuse_stale_prefix: bool = False
  migration_s: float = math.inf
  seed: int = 0

  def __post_init__(self):
    known = f'one of {", ".join(POLICIES)}'
    require(self, self.policy in POLICIES, 'policy', known)
    for field in ('observe_s', 'restart_s', 'migration_s'):
      require(self, getattr(self, field) > 0, field, 'positive')
    require(self, self.max_attempts >= 1, 'max_attempts', 'at least 1')
    require(self, self.max_restarts >= 0, 'max_restarts', 'at least 0')
