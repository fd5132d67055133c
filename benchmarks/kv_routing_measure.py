"""Times of a small real engine on this machine, for `benchmarks.kv_routing --measure`.

The model is that of `benchmarks.rollout` (13.5M parameters, fp32). Calls of several
shapes are timed, and the terms of `Times` are the non-negative fit. Load on the machine
changes them; it does not change the policies' order by much, which is why times of a
large slice can be simulated at all.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from benchmarks import rollout_worker
from benchmarks.kv_routing_cluster import ClusterConfig
from benchmarks.kv_routing_engine import Times
from benchmarks.kv_routing_trace import TraceConfig
from benchmarks.rollout_workload import CONTEXT, MODEL
from m2jax import model
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.decode_state import make_slots
from m2jax.rollout.engine.engine import Engine

_ROUNDS = 5
SLOTS, STEPS = 16, 8
_ENGINE = EngineConfig(
  slots=SLOTS,
  context_tokens=CONTEXT,
  max_steps=STEPS,
  decode_rows=(SLOTS,),
  prefill_shapes=((1, 64), (1, 256), (4, 64)),
  contexts=(256, 1024, CONTEXT),
)


def times(engine: Engine) -> Times:
  """Measures prefill and decode calls of all shapes."""
  cfg, config = engine.cfg, engine.config
  every, steps = config.slots, config.max_steps
  m2 = model.M2(cfg)
  variables = jax.jit(m2.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
  params = engine.load_params(variables)
  state = engine.warmup(params, engine.init_decode_state())
  prefill, decode = [], []
  for n in config.table_sizes:
    context = n * config.page_tokens
    for rows, chunk in config.prefill_shapes:
      tokens = np.ones((rows, chunk), np.int32)
      start = np.full(rows, context - chunk, np.int32)
      count = np.full(rows, chunk, np.int32)
      tables = np.stack([_table(config, row, n) for row in range(rows)])
      seconds = []
      for _ in range(_ROUNDS):
        begin = time.perf_counter()
        state = engine.prefill_rows(params, state, tokens, start, count, tables)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begin)
      reads = rows * chunk * (2 * (context - chunk) + chunk + 1) // 2
      prefill.append((1, rows * chunk, reads, statistics.median(seconds)))
    for live in (1, every):
      slots = make_slots(every, config)
      slots.length[:], slots.remaining[:] = context - steps - 1, 1 << 20
      order = np.arange(every, dtype=np.int32)
      number = np.array([live], np.int32)
      tables = np.stack([_table(config, row, n) for row in range(every)])
      seconds = []
      for _ in range(_ROUNDS):
        state = engine.admit(state, order, np.array([every], np.int32), slots)
        begin = time.perf_counter()
        state, found = engine.generate_many(
          params, state, order, number, tables, np.int32(steps)
        )
        jax.block_until_ready(found)
        seconds.append(time.perf_counter() - begin)
      reads = steps * live * context
      decode.append((1, steps, steps * live, reads, statistics.median(seconds)))
  a, b = _fit(prefill), _fit([(s, r, p, t) for _, s, r, p, t in decode])
  return Times(a[0], a[1], a[2], 0.0, b[0], b[1], b[2])


def scaled(
  cluster: ClusterConfig, trace: TraceConfig
) -> tuple[ClusterConfig, TraceConfig]:
  """Replicas with measured times, and sessions of the same statistics for them."""
  engine = Engine(rollout_worker.model_config(), _ENGINE)
  share = CONTEXT / trace.context_tokens
  smaller = dataclasses.replace(
    trace,
    context_tokens=CONTEXT,
    page_tokens=_ENGINE.page_tokens,
    vocabulary=MODEL['vocab_size'],
    system_tokens=max(16, round(trace.system_tokens * share)),
    response_tokens=max(4.0, trace.response_tokens * share),
    tool_s=trace.tool_s / 10,
  )
  pages = 1 + SLOTS * _ENGINE.context_pages // 2
  return (
    dataclasses.replace(
      cluster,
      engine=dataclasses.replace(_ENGINE, pages=pages),
      scheduler=dataclasses.replace(
        cluster.scheduler, decode_steps=STEPS, prefill_budget_tokens=1024
      ),
      times=times(engine),
      vocabulary=MODEL['vocab_size'],
      migration_bytes_per_s=0.0,
    ),
    smaller,
  )


def _table(config: EngineConfig, row: int, pages: int) -> np.ndarray:
  return 1 + row * config.context_pages + np.arange(pages, dtype=np.int32)


def _fit(rows: list[tuple]) -> np.ndarray:
  """Non-negative x of columns · x ≈ the last column, relative errors equal."""
  table = np.array(rows, float)
  table /= table[:, -1:]
  scale = np.maximum(table[:, :-1].max(axis=0), 1e-30)
  return nnls(table[:, :-1] / scale, table[:, -1])[0] / scale
