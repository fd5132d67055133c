"""What detectors need from a run's config.json; it is read as untrusted JSON."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from m2jax.text import json_lines

MAX_BYTES = 16 << 20


def read(workdir: pathlib.Path) -> dict[str, Any]:
  """WORKDIR/config.json; {} if there is none that can be read."""
  try:
    with open(workdir / 'config.json', 'rb') as file:
      found = json_lines.loads(file.read(MAX_BYTES))
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}


def get(config: Any, path: str, default: Any = None) -> Any:
  """The value of a dotted name, or the default where a part of it is missing."""
  for name in path.split('.'):
    if not isinstance(config, Mapping) or name not in config:
      return default
    config = config[name]
  return config


def number(config: Any, path: str) -> float | None:
  """The value of a dotted name if it is a number."""
  value = get(config, path)
  return value if type(value) in (int, float) else None


def exact_numerics(config: Mapping[str, Any]) -> bool:
  """Whether engine and learner should agree up to float32's rounding (`forge`)."""
  return (
    get(config, 'model.dtype') == 'float32'
    and get(config, 'model.matmuls.kind') == 'plain'
    and get(config, 'engine.cache_dtype') in (None, 'float32')
    and get(config, 'engine.weights_dtype') is None
    and get(config, 'scheduler.reuse_stale_prefix') is False
  )


def clip_range(config: Mapping[str, Any]) -> float | None:
  """The smaller clip range of an estimator that clips tokens; None of others."""
  estimator = get(config, 'rl.learner.estimator')
  if get(estimator, 'kind') not in ('grpo', 'dapo'):
    return None
  found = [number(estimator, name) for name in ('clip_low', 'clip_high')]
  return min((x for x in found if x is not None), default=None)


def queue_versions(config: Mapping[str, Any]) -> float | None:
  """Updates in which N + W − 2 items are taken; None if the settings are unknown."""
  capacity = number(config, 'rl.capacity')
  per_step = number(config, 'rl.groups_per_step')
  if not capacity or not per_step or not 0 < per_step <= capacity < 1e9:
    return None
  window = get(config, 'rl.window')
  if type(window) is not int:
    window = max(1, int(0.3 * capacity)) if window == 'default' else capacity
  return (capacity + window) / per_step
