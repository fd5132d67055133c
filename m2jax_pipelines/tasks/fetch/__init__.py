"""Look-ups that take time: one at a time, or several in a turn (DESIGN §3, tasks/).

The tasks of the speed reward (docs/rl.md). `independent_N` asks for the values of N
keys, which may be looked up in parallel; in `chain_N` each value is the next key, so
that every call has to wait for the one before. A spec:

    fetch/held_out/independent_3/7/12        split, family, seed, index
    fetch/train/chain_2/7/12?{"latency_s":[0.1,0.2]}
"""

from m2jax_pipelines.tasks.fetch.task import (
  FAMILIES,
  SPLITS,
  FetchConfig,
  FetchTask,
  families,
  make,
  spec,
)
from m2jax_pipelines.tasks.fetch.teacher import TeacherConfig, demonstrate

Config = FetchConfig

__all__ = [
  'FAMILIES',
  'SPLITS',
  'Config',
  'FetchConfig',
  'FetchTask',
  'TeacherConfig',
  'demonstrate',
  'families',
  'make',
  'spec',
]
