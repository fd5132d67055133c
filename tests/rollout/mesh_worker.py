"""The engine's calls over 8 virtual CPU devices; prints JSON, one line a case.

python -m tests.rollout.mesh_worker NAME…    (of CASES)

A line compares everything that the calls return, and the slots after them, with one
device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import numpy as np

from m2jax import sharding
from m2jax.rollout.decode_state import Slots, make_slots
from m2jax.rollout.engine import Engine
from m2jax.rollout.engine_config import EngineConfig
from tests import quick
from tests.sharding import small

# Five rows and six slots divide over no mesh here.
CONFIG = EngineConfig(
  slots=6,
  context_tokens=24,
  max_steps=4,
  decode_rows=(5,),
  prefill_shapes=((3, 8),),
  contexts=(24,),
  max_stop_ids=2,
  record_experts=True,
)
PROMPT = 7


@dataclasses.dataclass(frozen=True)
class Case:
  """A mesh, fields of the model, and whether JetStream's calls are made too."""

  mesh: dict[str, int]
  model: dict[str, Any] = dataclasses.field(default_factory=dict)
  jetstream: bool = False


CASES = {
  'fsdp expert tensor': Case(dict(fsdp=2, expert=2, tensor=2), jetstream=True),
  'data tensor': Case(dict(data=2, tensor=4)),
  'data': Case(dict(data=8)),
  'fsdp': Case(dict(fsdp=8)),
  'expert': Case(dict(expert=8)),
  'tensor': Case(dict(tensor=4)),
  # Of keys and values, which are not split.
  'tensor, few heads': Case(dict(tensor=8), jetstream=True),
  'data fsdp': Case(dict(data=2, fsdp=4)),
  'data expert': Case(dict(data=4, expert=2)),
  'fsdp expert': Case(dict(fsdp=2, expert=4)),
  'fsdp tensor': Case(dict(fsdp=4, tensor=2)),
  'expert tensor': Case(dict(expert=4, tensor=2), dict(unroll_layers=True)),
  'context expert': Case(dict(context=2, expert=4)),
}


def model(case: Case):
  return small.config(dtype='float32', param_dtype='float32', **case.model)


def requests() -> Slots:
  """Five that stop at different times, and draw in different ways."""
  slots = make_slots(CONFIG.slots, CONFIG.max_stop_ids)
  slots.length[:5], slots.token[:5] = PROMPT, (3, 4, 5, 6, 7)
  slots.remaining[:5] = 2, 12, 7, 1, 12
  slots.seed[:, 1] = 10 + np.arange(6)
  slots.temperature[:5] = 1, 0, 1, 0.7, 1
  slots.top_k[3], slots.top_p[4] = 5, 0.9
  return slots


def scheduled(engine: Engine, weights, others) -> dict[str, Any]:
  """What the scheduler's calls return; `others` replace the weights in between."""
  out, n = {}, np.int32
  tokens = np.random.default_rng(0).integers(88, size=(3, 8)).astype(n)
  state = engine.warmup(weights, engine.init_decode_state())
  compiled = engine.compilations()
  state = engine.prefill_rows(
    *(weights, state, np.array([4, 0, 2], n), n(3), tokens, np.zeros(3, n)), context=24
  )
  copies = np.array([[4, 0, 0, 0, 0, 0], [1, 5, 0, 0, 0, 0]], n)
  state = engine.copy_rows(state, *copies, n(2), context=24)
  rows = np.array([4, 1, 0, 5, 2], n)
  state = engine.admit(state, np.resize(rows, 6), n(5), requests())
  for call in range(3):
    if call == 1:
      weights = engine.load_params(others)
    state, sampled = engine.generate_many(
      weights, state, rows, n(5 - call), n(4), context=24
    )
    drawn = np.arange(4) < np.asarray(sampled.counts)[:, None]
    out[f'finish {call}'] = sampled.finish_code
    out[f'tokens {call}'] = np.where(drawn, sampled.tokens, -1)
    out[f'logprobs {call}'] = np.where(drawn, sampled.logprobs, 0)
  out['slots'] = dataclasses.asdict(jax.device_get(state.slots))
  for slot, length in enumerate(out['slots']['length']):
    ids = np.asarray(engine.expert_ids(state, n(slot), context=24))
    out[f'experts {slot}'] = ids[:length]
  assert engine.compilations() == compiled
  return out


def jetstream(engine: Engine, weights) -> dict[str, Any]:
  """What JetStream's calls return."""
  state, out = engine.init_decode_state(), {}
  tokens = np.random.default_rng(1).integers(88, size=(2, 8))
  first = engine.prefill(weights, padded_tokens=tokens[0], true_length=6)
  longer = engine.prefill(
    weights, existing_prefix=first, padded_tokens=tokens[1], true_length=8
  )
  longer = jax.device_put(longer, engine.get_prefix_destination_sharding())
  for slot, prefix in ((1, first), (4, longer)):
    state = engine.insert(prefix, state, slot)
  for step in range(3):
    state, result = engine.generate(weights, state)
    out[f'step {step}'] = np.asarray(result.data)[[1, 4]]
    out[f'step {step} logprobs'] = np.asarray(result.log_prob)[[1, 4]]
    out[f'step {step} valid'] = np.asarray(result.data)[:, 1]
  return out


def results(case: Case, where: sharding.Sharding, learner: sharding.Sharding):
  """(results, engine); the second weights come as `learner` places them."""
  cfg = model(case)
  engine = Engine(cfg, CONFIG, where)
  first, second = (quick.variables(cfg, i, noise=0.1, bias=0.1) for i in range(2))
  second = learner.place(second, sharding.param_specs(cfg, learner.rules))
  weights = engine.load_params(first)
  out = scheduled(engine, weights, second)
  if case.jetstream:
    out['jetstream'] = jetstream(engine, weights)
  return out, (engine, weights)


@functools.cache
def alone(unroll: bool):
  case = Case({}, dict(unroll_layers=unroll), jetstream=not unroll)
  return results(case, sharding.ONE_DEVICE, sharding.ONE_DEVICE)[0]


def run(case: Case) -> dict[str, Any]:
  where = sharding.make(sharding.MeshConfig(**case.mesh))
  size = np.prod(list(case.mesh.values()))
  # Other mesh, other rules, the same devices.
  learner = sharding.make(sharding.MeshConfig(fsdp=int(size) // 2, tensor=2))
  got, (engine, weights) = results(case, where, learner)
  want = {name: alone(case.model.get('unroll_layers', False))[name] for name in got}
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
  cache = engine.init_decode_state().cache
  return {
    'differing': differing,
    'worst': [worst, errors[worst]],
    'leaves': len(jax.tree.leaves(want)),
    'drawn': int(sum(np.sum(want[f'tokens {call}'] >= 0) for call in range(3))),
    'devices': len(weights['params']['head'].sharding.device_set),
    'heads_of_device': cache.k.sharding.shard_shape(cache.k.shape)[2],
    'experts_of_device': _part(weights['params']['layers']['gate'], 1),
  }


def _part(x: jax.Array, axis: int) -> int:
  return x.sharding.shard_shape(x.shape)[axis]


def main(names):
  jax.config.update('jax_num_cpu_devices', 8)
  for name in names:
    print(json.dumps({'case': name, **run(CASES[name])}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
