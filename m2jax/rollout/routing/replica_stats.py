"""What the router reads of its replicas' statistics, and the statistics of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from m2jax.rollout.api import Serving
from m2jax.rollout.routing.fleet import Sizes

_EQUAL = ('page_tokens', 'prefill_budget_tokens', 'decode_steps')  # not summed
_EXPECTED = ('queue_length', 'active_slots', 'slots', 'tokens_per_s', *_EQUAL)


def sizes(stats: Mapping[str, float]) -> Sizes:
  """Sizes of a replica, from `Scheduler.stats`."""
  return Sizes(
    pages=int(stats['pages']),
    page_tokens=int(stats['page_tokens']),
    slots=int(stats['slots']),
    budget_tokens=stats['prefill_budget_tokens'],
    steps=int(stats['decode_steps']),
  )


def all_sizes(replicas: Sequence[Serving], page_tokens: int | None) -> list[Sizes]:
  """Sizes of all replicas; those that do not serve yet get a placeholder.

  Args:
    page_tokens: tokens per page, the same for all; None: taken from those that serve.

  Raises:
    ValueError: none serves, and page_tokens is None.
  """
  found = [sizes(r.stats()) if r.alive else None for r in replicas]
  if page_tokens is None:
    page_tokens = next((size.page_tokens for size in found if size), None)
  if page_tokens is None:
    raise ValueError('page_tokens: is needed if no replica serves yet')
  absent = Sizes(pages=1, page_tokens=page_tokens, slots=1)
  return [size or absent for size in found]


def total(
  living: Sequence[Mapping[str, float]], past: Mapping[str, float], version: int
) -> dict[str, float]:
  """The statistics of all replicas as those of one engine.

  Args:
    living: statistics of each replica that serves.
    past: statistics to add, such as totals of replicas that no longer serve.
    version: version of the weights published last, used if no replica serves.
  """
  out = dict.fromkeys(_EXPECTED, 0) | past | {'living_replicas': len(living)}
  for stats in living:
    for key, value in stats.items():
      if key not in (*_EQUAL, 'policy_version'):
        out[key] = out.get(key, 0) + value
  for key in _EQUAL:
    out[key] = living[0][key] if living else 0
  versions = [stats['policy_version'] for stats in living]
  return out | {'policy_version': min(versions, default=version)}
