"""What memory beyond the device cache saves, and what it costs.

  python -m benchmarks.prefix_memory [--json]

Agents (rollout_workload.Sessions) on the model with 13.5M parameters of
benchmarks.rollout, all in flight from the start, greedy. Rows are the memories:

  device       the device cache alone
  host         and host memory for all pages
  pool         and a pool of local files, empty at the start
  pool, again  a new engine that plays the same agents on the pool of the row before

once with a device cache for --share of what the agents' contexts need (few pages), and
once with room for all of them, where more memory can save nothing (enough pages): there
the ratio is its cost. Prints the share of prompt tokens that were found, the number
computed, sampled tokens per second, and the ratio to `device`. Rounds take turns over
the rows, so that other load on the machine affects all; the first one warms up.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time

import jax
from absl import flags

from benchmarks import harness, rollout_worker
from benchmarks import rollout_workload as workload
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.rollout.tiers.config import KvPoolConfig
from m2jax.train import step as train_step

# A separate set: tests also import programs with flags of the same names.
FLAGS = flags.FlagValues()
_integer = lambda name, default, help_: flags.DEFINE_integer(
  name, default, help_, flag_values=FLAGS, lower_bound=1
)
_SESSIONS = _integer('sessions', 16, 'agents in flight')
_TURNS = _integer('turns', 8, 'of each agent')
_ROUNDS = _integer('rounds', 4, 'rounds, one to warm up')
_SYSTEM = _integer('system_tokens', 64, 'of the prompt that all agents share')
_SHARE = flags.DEFINE_float(
  'share', 0.25, 'pages of the small cache', flag_values=FLAGS, lower_bound=0.0
)
flags.DEFINE_bool('json', False, 'print JSON', flag_values=FLAGS)

SLOTS = 4
MEMORY_BYTES = 1 << 30
ROWS = ('device', 'host', 'pool', 'pool, again')


def scheduler_config(row: str, directory: str) -> SchedulerConfig:
  fields = {}
  if row != 'device':
    fields['host_cache_bytes'] = MEMORY_BYTES
  if row.startswith('pool'):
    url = f'file://{directory}/'
    # A queue for all pages, so that the next row finds them.
    fields['kv_pool'] = KvPoolConfig(url, MEMORY_BYTES, queue_pages=1 << 16)
  return SchedulerConfig(**fields)


def measure(
  engine: Engine, variables, config: SchedulerConfig, *, warmup: bool
) -> dict[str, float]:
  """Plays the agents on a new scheduler; the first one of an engine compiles."""
  scheduler = Scheduler(engine, variables, config=config).start(warmup=warmup)
  started = time.perf_counter()
  rollout_worker.play(scheduler, sessions(), 0)
  seconds = time.perf_counter() - started
  scheduler.stop()
  stats = scheduler.stats()
  return {
    'tokens_per_s': stats['sampled_tokens'] / seconds,
    'hit_share': stats['prefix_hit_tokens'] / stats['prompt_tokens'],
    'prefill_tokens': stats['prefill_tokens'],
    'sampled_tokens': stats['sampled_tokens'],
    'host_hit_tokens': stats.get('host_hit_tokens', 0),
    'pool_hit_tokens': stats.get('pool_hit_tokens', 0),
    'dropped_pages': stats.get('pool_dropped_pages', 0),
  }


def sessions() -> workload.Sessions:
  return workload.Sessions(_SESSIONS.value, _TURNS.value, system_tokens=_SYSTEM.value)


def engines(cfg) -> dict[str, Engine]:
  """Name of the cache → engine."""
  given, base = sessions(), rollout_worker.engine_config(SLOTS)
  turn = given.turn_tokens + given.new_tokens
  context = given.system_tokens + given.task_tokens + given.turns * turn
  least = EngineConfig(
    slots=SLOTS, context_tokens=context, page_tokens=base.page_tokens
  )
  need = given.count * least.context_pages
  few = max(int(_SHARE.value * need), 1 + least.context_pages)
  shapes = ((1, 64), (SLOTS, 64))
  sizes = dict(context_tokens=context, contexts=(context,), prefill_shapes=shapes)
  return {
    f'{name} pages': Engine(cfg, dataclasses.replace(base, pages=pages, **sizes))
    for name, pages in (('few', few), ('enough', 1 + need + least.context_pages))
  }


def compare() -> dict[str, dict]:
  """Medians over rounds for each cache and memory, and ratios to `device`."""
  cfg = rollout_worker.model_config()
  variables = train_step.init_variables(cfg, jax.random.key(0))
  found: dict[tuple[str, str], list[dict]] = {}
  for cache, engine in engines(cfg).items():
    for number in range(_ROUNDS.value):
      with tempfile.TemporaryDirectory() as directory:
        for row in ROWS:
          config = scheduler_config(row, directory)
          result = measure(engine, variables, config, warmup=not number)
          if number:
            found.setdefault((cache, row), []).append(result)
  out = {}
  for (cache, row), results in found.items():
    base = found[cache, 'device']
    ratios = [
      a['tokens_per_s'] / b['tokens_per_s'] for a, b in zip(results, base, strict=True)
    ]
    median = {k: statistics.median(r[k] for r in results) for k in results[0]}
    out.setdefault(cache, {})[row] = median | {
      'ratio': statistics.median(ratios),
      'ratios': [min(ratios), max(ratios)],
    }
  return out


def show(found: dict[str, dict]) -> None:
  print('| cache | memory | found | prefill tokens | tokens/s | to device | range |')
  print('|---|---|---|---|---|---|---|')
  for cache, rows in found.items():
    for row, x in rows.items():
      low, high = x['ratios']
      print(
        f'| {cache} | {row} | {x["hit_share"]:.1%} | {x["prefill_tokens"]:.0f} '
        f'| {x["tokens_per_s"]:.0f} | {x["ratio"]:.2f} | {low:.2f}–{high:.2f} |'
      )


if __name__ == '__main__':
  harness.main(FLAGS, compare, show)
