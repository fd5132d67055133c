"""m2jax's side of `benchmarks.rollout`, a process of its own.

  python -m benchmarks.rollout_worker

One JSON command per line of stdin, one answer per line:

  {"do": "make", "slots", "look_ahead"}               → {"version"}
  {"do": "save", "directory"}                         → {}; writes the weights
  {"do": "batches", "requests", "prompt", "new", "seeds"}
                                      → {"seconds", "cpu_s", "tokens"}, of all of them
  {"do": "sessions", "seed", …}       → the same, and tokens of prompts and of hits
  {"do": "memory", "prompt", "new"}   → pages and bytes, see `Server.memory`
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks import rollout_workload as workload
from m2jax import platforms, sharding, startup
from m2jax.checkpoint import huggingface
from m2jax.config import ModelConfig
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.rollout.tiers.page_layout import Layout
from m2jax.train import step as train_step

ON_ALL_CORES = sharding.MeshConfig(expert=-1)


def model_config() -> ModelConfig:
  return ModelConfig(
    **workload.MODEL,
    rotary_dim=16,
    num_mtp_modules=0,
    max_positions=workload.CONTEXT,
    dtype='float32',
    param_dtype='float32',
    unroll_layers=True,
  )


def engine_config(slots: int) -> EngineConfig:
  """The defaults of these sizes."""
  return EngineConfig(slots=slots, context_tokens=workload.CONTEXT)


class Server:
  """The engine and its scheduler."""

  def __init__(
    self,
    slots: int,
    look_ahead: bool = True,
    mesh: sharding.MeshConfig = ON_ALL_CORES,
    wrap: Callable = lambda engine: engine,
  ):
    self.cfg = model_config()
    self.variables = train_step.init_variables(self.cfg, jax.random.key(0))
    where = sharding.make(mesh)
    self.engine = wrap(Engine(self.cfg, engine_config(slots), where))
    config = SchedulerConfig(look_ahead=look_ahead)
    self.scheduler = Scheduler(self.engine, self.variables, config=config).start()

  def batches(self, seeds: Sequence[int], **fields) -> dict:
    """Serves the batches one after the other."""
    return workload.summed([self.batch(seed=seed, **fields) for seed in seeds])

  def batch(self, requests: int, prompt: int, new: int, seed: int) -> dict:
    prompts = workload.batch(requests, prompt, seed)
    handles = [submit(self.scheduler, tokens, new) for tokens in prompts]
    found = [handle.future.result().tokens for handle in handles]
    return {'tokens': sum(map(len, found)), 'first': found[0].tolist()}

  def sessions(self, seed: int, **fields) -> dict:
    before = self.scheduler.stats()['prefix_hit_tokens']
    counts = play(self.scheduler, workload.Sessions(**fields), seed)
    hits = self.scheduler.stats()['prefix_hit_tokens'] - before
    return {**counts, 'tokens': counts['new_tokens'], 'hit_tokens': hits}

  def memory(self, prompt: int, new: int) -> dict:
    """Serves twice as many requests as there are slots. Returns pages (of the budget,
    and the most in use at once since the start) and bytes (of the budget, and of the
    cache on the devices afterwards)."""
    config, groups = self.engine.config, self.engine.groups
    self.batch(2 * groups * config.slots, prompt, new, seed=0)
    stats = self.scheduler.stats()
    page_bytes = Layout.of(self.engine.state_shapes().pages).page_bytes
    return {
      'budget_pages': groups * (config.pages - 1),
      'peak_pages': stats['peak_pages'],
      'budget_bytes': groups * config.pages * page_bytes,
      'cache_bytes': stats['page_bytes'],
    }


def submit(scheduler: Scheduler, prompt, new_tokens: int):
  sampling = SamplingParams(new_tokens, temperature=0.0)
  return scheduler.submit(GenerateRequest(prompt, sampling))


def play(scheduler: Scheduler, given: workload.Sessions, seed: int) -> dict[str, int]:
  """Plays the sessions; returns what `workload.play` does."""
  done: queue.SimpleQueue = queue.SimpleQueue()

  def serve(step):
    def go_on(session, response):
      if (prompt := step(session, response)) is None:
        return 0
      handle = submit(scheduler, prompt, given.new_tokens)
      handle.future.add_done_callback(lambda f: done.put((session, f.result())))
      return 1

    running = sum(go_on(session, None) for session in range(given.count))
    while running:
      session, result = done.get()
      running += go_on(session, result.tokens.tolist()) - 1

  return workload.play(given, seed, serve)


def main() -> None:
  answers, sys.stdout = sys.stdout, sys.stderr
  server = None
  for line in sys.stdin:
    command = json.loads(line)
    do = command.pop('do')
    if do == 'make':
      startup.prepare(startup.devices())
      platforms.own_only()
      server = Server(**command)
      answer = {'version': f'jax {jax.__version__}'}
    elif do == 'save':
      huggingface.save(
        command['directory'], server.cfg, jax.tree.map(np.asarray, server.variables)
      )
      answer = {}
    else:
      started, cpu = time.perf_counter(), time.process_time()
      answer = getattr(server, do)(**command)
      answer['seconds'] = time.perf_counter() - started
      answer['cpu_s'] = time.process_time() - cpu
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
