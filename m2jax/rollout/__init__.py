"""The rollout engine: serves the policy in training.

1. A `GenerateRequest` is submitted to an `api.Serving`, which returns a `Handle`.
2. Of several engines, `routing` chooses one.
3. `serving` queues the request, and gives it a slot and pages.
4. `tiers` finds its longest cached prefix: on the device, in host memory, in a pool.
5. `engine` computes the rest of its prompt; with `disaggregation`, another engine does
   and hands the pages over.
6. `engine` samples its tokens, several steps per call, with their log-probabilities.
7. `serving` delivers them as they are sampled, and at the end a `GenerateResult`.

The names of `_MODULES` are imported when they are first used: a user of the records in
`api` only, such as a gateway, does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
  'EngineError': 'api',
  'EngineLost': 'api',
  'GenerateRequest': 'api',
  'GenerateResult': 'api',
  'Grammar': 'api',
  'GrammarError': 'api',
  'Handle': 'api',
  'NewTokens': 'api',
  'PageEvent': 'api',
  'PromptTooLong': 'api',
  'SamplingParams': 'api',
  'Serving': 'api',
  'Engine': 'engine.engine',
  'EngineConfig': 'engine.config',
  'KvPoolConfig': 'tiers.config',
  'Scheduler': 'serving.scheduler',
  'SchedulerConfig': 'serving.config',
  'Router': 'routing.router',
  'RouterConfig': 'routing.config',
  'Disaggregated': 'disaggregation.decode_engine',
  'HandoverConfig': 'disaggregation.handover',
  'PrefillScheduler': 'disaggregation.prefill_engine',
  'PrefillServer': 'disaggregation.prefill_server',
  'RemotePrefills': 'disaggregation.remote_prefill',
  'EngineApi': 'jetstream.calls',
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)


def __dir__() -> list[str]:
  return [*globals(), *_MODULES]
