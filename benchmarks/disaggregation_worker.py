"""An engine of `benchmarks.disaggregation`, a process of its own.

  python -m benchmarks.disaggregation_worker

One JSON command per line of stdin, one answer per line:

  {"do": "prefill", "address"}                → {"address"}; serves until stdin ends
  {"do": "make", "address" | null, …}         → {"version", "local_tokens"}
  {"do": "play", "seconds", "seed", …}        → latencies of every request
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import jax
import numpy as np

from benchmarks import rollout_workload as workload
from benchmarks.rollout_worker import model_config
from m2jax import startup
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.disaggregation import handover
from m2jax.rollout.disaggregation.decode_engine import Disaggregated
from m2jax.rollout.disaggregation.handover import PART_PAGES
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler
from m2jax.rollout.disaggregation.prefill_server import PrefillServer
from m2jax.rollout.disaggregation.remote_prefill import RemotePrefills
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.train import step as train_step

SLOTS = 32
CHUNK = 256  # tokens of the largest prefill call


def engine_config() -> EngineConfig:
  return EngineConfig(
    slots=SLOTS,
    context_tokens=workload.CONTEXT,
    pages=1 + SLOTS * 64,
    max_steps=4,
    decode_rows=(8, SLOTS),
    contexts=(256, workload.CONTEXT),
    prefill_shapes=((1, 64), (8, 64), (1, CHUNK)),
  )


@dataclasses.dataclass
class Kind:
  """Requests of one kind: rate per second, tokens of prompt and response."""

  rate: float
  prompt: int
  new: int


class Server:
  """Schedulers over one engine, by the prefill budget between two decode calls."""

  def __init__(self, address: str | None, decode_steps: int, budgets: list[int]):
    """Uses a prefill process if there is an address."""
    cfg, config = model_config(), engine_config()
    variables = train_step.init_variables(cfg, jax.random.key(0))
    engine = Engine(cfg, config)
    self.schedulers = {}
    for budget in budgets:
      how = SchedulerConfig(decode_steps=decode_steps, prefill_budget_tokens=budget)
      if address is None:
        scheduler = Scheduler(engine, variables, config=how)
      else:
        source = RemotePrefills(address, handover.layout(cfg, config, PART_PAGES))
        scheduler = Disaggregated(engine, variables, source, config=how)
      self.schedulers[budget] = scheduler.start()

  def play(self, budget: int, seconds: float, seed: int, kinds: dict) -> dict:
    """Requests arrive at random for that time in seconds; all are waited for."""
    scheduler = self.schedulers[budget]
    random = np.random.default_rng(seed)
    arrivals = []
    for name, fields in kinds.items():
      kind, at = Kind(**fields), 0.0
      while kind.rate and (at := at + random.exponential(1 / kind.rate)) < seconds:
        prompt = random.integers(1, workload.VOCABULARY, kind.prompt)
        arrivals.append((at, name, prompt, kind.new))
    before = scheduler.stats()
    found, begin = [], time.perf_counter()
    for at, name, prompt, new in sorted(arrivals, key=lambda a: a[0]):
      time.sleep(max(begin + at - time.perf_counter(), 0))
      found.append((name, *_submit(scheduler, prompt, new)))
    for _, _, _, handle in found:
      handle.future.result(300)
    elapsed, after = time.perf_counter() - begin, scheduler.stats()
    moved = {
      key: after[key] - before[key]
      for key in ('sampled_tokens', 'handovers', 'handover_bytes', 'prefills_alone')
      if key in after
    }
    latencies = [
      dict(kind=name, first_s=times[0] - start, gaps_s=np.diff(times).tolist())
      for name, start, times, _ in found
    ]
    return dict(requests=latencies, elapsed_s=elapsed, **moved)


def _submit(scheduler: Scheduler, prompt, new: int):
  times: list[float] = []
  sampling = SamplingParams(new, temperature=0.0)
  start = time.perf_counter()
  handle = scheduler.submit(
    GenerateRequest(prompt, sampling), lambda _: times.append(time.perf_counter())
  )
  return start, times, handle


def prefill(address: str) -> PrefillServer:
  cfg = model_config()
  variables = train_step.init_variables(cfg, jax.random.key(0))
  scheduler = PrefillScheduler(Engine(cfg, engine_config()), variables)
  return PrefillServer(scheduler, address, load=lambda version: variables).start()


def main() -> None:
  answers, sys.stdout = sys.stdout, sys.stderr
  startup.prepare()
  server = None
  for line in sys.stdin:
    command = json.loads(line)
    do = command.pop('do')
    if do == 'prefill':
      server = prefill(**command)
      answer = {'address': server.address}
    elif do == 'make':
      server = Server(**command)
      stats = [scheduler.stats() for scheduler in server.schedulers.values()]
      answer = {'version': f'jax {jax.__version__}'}
      answer['local_tokens'] = stats[0].get('local_tokens')
    else:
      answer = server.play(**command)
    print(json.dumps(answer), file=answers, flush=True)
  if isinstance(server, PrefillServer):
    server.stop()


if __name__ == '__main__':
  main()
