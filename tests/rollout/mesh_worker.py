"""The engine's calls over 8 virtual CPU devices; prints JSON, one line a case.

python -m tests.rollout.mesh_worker NAME…    (of CASES)

A line compares everything that the scheduler's and JetStream's calls return with one
device.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import numpy as np

from m2jax import platforms, sharding
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine import placement
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.decode_state import make_slots
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.jetstream.calls import EngineApi
from m2jax.rollout.serving import sequences
from m2jax.rollout.serving.batcher import Batcher
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.jobs import Job
from tests import quick
from tests.sharding import small

CONFIG = EngineConfig(
  slots=5,
  context_tokens=24,
  page_tokens=4,
  max_steps=4,
  decode_rows=(5,),
  prefill_shapes=((3, 8),),
  contexts=(24,),
  max_stop_ids=2,
  record_experts=True,
)


def make_engine(
  cfg, config: EngineConfig, where: sharding.Sharding = sharding.ONE_DEVICE
) -> Engine:
  """An engine, each of whose groups of devices has the sizes of `config`."""
  groups = placement.serving(cfg, where).size('rows')
  whole = dataclasses.replace(
    config,
    slots=groups * config.slots,
    pages=1 + groups * (config.pages - 1),
    decode_rows=tuple(groups * rows for rows in config.decode_rows),
    prefill_shapes=tuple((groups * rows, c) for rows, c in config.prefill_shapes),
  )
  engine = EngineApi(cfg, whole, where)
  assert engine.config == config
  return engine


@dataclasses.dataclass(frozen=True)
class Case:
  """A mesh, fields of the model, whether JetStream's calls are made too, the drafts of
  each step, whether pages are moved to host memory, and other rows of decode calls."""

  mesh: dict[str, int]
  model: dict[str, Any] = dataclasses.field(default_factory=dict)
  jetstream: bool = False
  drafts: int = 0
  host: bool = False
  decode_rows: tuple[int, ...] = CONFIG.decode_rows


CASES = {
  'fsdp expert tensor': Case(dict(fsdp=2, expert=2, tensor=2), jetstream=True),
  'data tensor': Case(dict(data=2, tensor=4), host=True),
  'fsdp': Case(dict(fsdp=8)),
  # Of keys and values, which are not split.
  'tensor, few heads': Case(dict(tensor=8), jetstream=True),
  # Calls of at most FEW_TOKENS, and of more.
  'expert tensor': Case(
    dict(expert=4, tensor=2), dict(unroll_layers=True), decode_rows=(2, 5)
  ),
  'context expert': Case(dict(context=2, expert=4)),
  # Weights change after as many tokens only with as many drafts on one device.
  'drafts': Case(dict(fsdp=2, expert=2, tensor=2), drafts=1),
  'drafts, unrolled': Case(dict(data=4, tensor=2), dict(unroll_layers=True), drafts=1),
}


def model(case: Case):
  how = dict(num_layers=1, dtype='float32', param_dtype='float32')
  return small.config(**how | case.model)


def jobs() -> list[Job]:
  """Requests that end at different times and draw in different ways; the third goes on
  where the first prompt ends."""
  random = np.random.default_rng(0)
  prompts = [random.integers(88, size=n) for n in (11, 7, 4, 9, 2)]
  prompts[2] = np.concatenate([prompts[0], prompts[2]])
  drawing = (
    dict(max_tokens=2),
    dict(max_tokens=12, temperature=0.0),
    dict(max_tokens=7),
    dict(max_tokens=1, temperature=0.7, top_k=5),
    dict(max_tokens=12, top_p=0.9),
  )
  return [
    Job(
      prompt.astype(np.int32),
      GenerateRequest(prompt, SamplingParams(**how)),
      10 + i,
      None,
      concurrent.futures.Future(),
    )
    for i, (prompt, how) in enumerate(zip(prompts, drawing, strict=True))
  ]


def scheduled(engine: Engine, weights, others) -> dict[str, Any]:
  """What the scheduler returns; `others` replace the weights in between."""
  config = SchedulerConfig(decode_steps=4, draft_tokens=engine.config.draft_tokens)
  batcher = Batcher(engine, weights, 0, config)
  batcher.state = engine.warmup(weights, batcher.state)
  compiled, requests = engine.compilations(), jobs()
  batcher.waiting.extend(requests)
  for tick in range(10):
    if tick == 1:
      batcher.replace_weights(engine.load_params(others), 1)
    batcher.tick()
  assert not batcher.busy and engine.compilations() == compiled
  assert batcher.counts['prefix_hit_tokens'] == 8
  assert (batcher.drafting.drafted > 0) == (engine.config.draft_tokens > 0)
  found = [job.future.result() for job in requests]
  return {
    f'{name} {i}': np.asarray(getattr(result, name))
    for i, result in enumerate(found)
    for name in ('tokens', 'logprobs', 'versions', 'experts')
  }


def from_host(engine: Engine, weights) -> dict[str, Any]:
  """What the requests return when their prefixes come back from host memory."""
  batcher = Batcher(engine, weights, 0, SchedulerConfig(4, host_cache_bytes=1 << 20))
  for _ in range(2):
    for cache in batcher.table.caches:  # evicts all pages
      cache.free(cache.allocate(cache.available))
    batcher.waiting.extend(requests := jobs())
    while batcher.busy:
      batcher.tick()
  assert batcher.tiers.stats()['host_hit_tokens'] > 16
  return {
    f'{name} {i}': np.asarray(getattr(job.future.result(), name))
    for i, job in enumerate(requests)
    for name in ('tokens', 'logprobs', 'experts')
  }


def jetstream(engine: EngineApi, weights) -> dict[str, Any]:
  """What JetStream's calls return, of slots of the first group and the last."""
  state, out = engine.init_decode_state(), {}
  tokens = np.random.default_rng(1).integers(88, size=(2, 8))
  first = engine.prefill(weights, padded_tokens=tokens[0], true_length=6)
  longer = engine.prefill(
    weights, existing_prefix=first, padded_tokens=tokens[1], true_length=8
  )
  longer = jax.device_put(longer, engine.get_prefix_destination_sharding())
  used = [1, engine.max_concurrent_decodes - 2]
  for i, (slot, prefix) in enumerate(zip(used, (first, longer), strict=True)):
    slots = make_slots(1, CONFIG)
    slots.seed[0] = (0, i)
    state = engine.insert(prefix, state, slot, slots=slots)
  for step in range(3):
    state, result = engine.generate(weights, state)
    out[f'step {step}'] = np.asarray(result.data)[used]
    out[f'step {step} logprobs'] = np.asarray(result.log_prob)[used]
    out[f'step {step} valid'] = np.sum(np.asarray(result.data)[:, 1])
  return out


def results(case: Case, where: sharding.Sharding, learner: sharding.Sharding):
  """(results, engine); the second weights come as `learner` places them."""
  cfg = model(case)
  config = dataclasses.replace(
    CONFIG, draft_tokens=case.drafts, decode_rows=case.decode_rows
  )
  engine = make_engine(cfg, config, where)
  first, second = (quick.variables(cfg, i, noise=0.1, bias=0.1) for i in range(2))
  second = learner.place(second, sharding.param_specs(cfg, learner.rules))
  weights = engine.load_params(first)
  out = scheduled(engine, weights, second)
  if case.host:
    out['host'] = from_host(engine, weights)
  if case.jetstream:
    out['jetstream'] = jetstream(engine, weights)
  return out, (engine, weights)


@functools.cache
def alone(unroll: bool, drafts: int, jetstream: bool, host: bool):
  model = dict(unroll_layers=unroll)
  case = Case({}, model, jetstream=jetstream, host=host, drafts=drafts)
  return results(case, sharding.ONE_DEVICE, sharding.ONE_DEVICE)[0]


def run(case: Case) -> dict[str, Any]:
  where = sharding.make(sharding.MeshConfig(**case.mesh))
  size = np.prod(list(case.mesh.values()))
  # Other mesh, other rules, the same devices.
  learner = sharding.make(sharding.MeshConfig(fsdp=int(size) // 2, tensor=2))
  got, (engine, weights) = results(case, where, learner)
  unroll = case.model.get('unroll_layers', False)
  want = alone(unroll, case.drafts, case.jetstream, case.host)
  differing, errors = [], {}
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  )
  for (path, a), b in pairs:
    name, a, b = jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)
    if np.issubdtype(b.dtype, np.floating):
      errors[name] = float(np.max(np.abs(a - b), initial=0))
    elif not np.array_equal(a, b):
      differing.append(name)
  worst = max(errors, key=errors.get)
  pages = engine.init_decode_state().pages
  down = weights['params']['layers']
  down = down[0]['down'] if isinstance(down, list) else down['down'][0]
  return {
    'differing': differing,
    'worst': [worst, errors[worst]],
    'leaves': len(jax.tree.leaves(want)),
    'drawn': sum(len(want[f'tokens {i}']) for i in range(5)),
    'devices': len(weights['params']['head'].sharding.device_set),
    'heads_of_device': _part(pages.k, 1),
    'pages_of_device': _part(pages.k, 2),
    'experts_of_device': _part(down, 0),
  }


def _part(x: jax.Array, axis: int) -> int:
  return x.sharding.shard_shape(x.shape)[axis]


def main(names):
  platforms.own_only()
  jax.config.update('jax_num_cpu_devices', 8)
  sequences.ROW_TOKENS = 1  # the prefix that prompts share is short
  for name in names:
    print(json.dumps({'case': name, **run(CASES[name])}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
