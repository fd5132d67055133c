"""An engine of `benchmarks.disaggregation`, a process of its own.

  python -m benchmarks.disaggregation_worker

One JSON command per line of stdin, one answer per line:

  {"do": "prefill", "address"}                → {"address"}; serves until stdin ends
  {"do": "make", "address", "slots", …}       → {"version", "rates", "local_tokens"}
  {"do": "play", "seconds", "seed", …}        → latencies of every request
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time

import jax
import numpy as np

from benchmarks import rollout_workload as workload
from benchmarks.rollout_worker import model_config
from m2jax.rollout import break_even, handover
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.disaggregated import Disaggregated
from m2jax.rollout.engine import Engine
from m2jax.rollout.engine_config import EngineConfig
from m2jax.rollout.handover import HandoverConfig
from m2jax.rollout.prefill_engine import PrefillScheduler
from m2jax.rollout.prefill_server import PrefillServer
from m2jax.rollout.remote_prefill import RemotePrefills
from m2jax.rollout.scheduler import Scheduler, SchedulerConfig
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
  """A scheduler, with a prefill process if there is an address."""

  def __init__(self, address: str | None, decode_steps: int, local_tokens: int | None):
    cfg, config = model_config(), engine_config()
    variables = train_step.init_variables(cfg, jax.random.key(0))
    engine = Engine(cfg, config)
    # One prefill call between two decode calls: the least that others wait.
    how = SchedulerConfig(decode_steps=decode_steps, prefill_budget_tokens=1)
    if address is None:
      self.scheduler = Scheduler(engine, variables, config=how)
    else:
      handing = HandoverConfig(local_tokens=local_tokens)
      layout = handover.layout(cfg, config, handing.part_pages)
      source = RemotePrefills(address, layout)
      self.scheduler = Disaggregated(
        engine, variables, source, config=how, how=handing
      )
    self.scheduler.start()
    _, self.rates = break_even.measure(
      engine,
      engine.load_params(variables),
      engine.init_decode_state(),
      decode_steps,
      handover.PART_PAGES,
    ) if address is None else (None, None)

  def play(self, seconds: float, seed: int, kinds: dict[str, dict]) -> dict:
    """Requests arrive at random for so many seconds; all are waited for."""
    random = np.random.default_rng(seed)
    arrivals = []
    for name, fields in kinds.items():
      kind, at = Kind(**fields), 0.0
      while kind.rate and (at := at + random.exponential(1 / kind.rate)) < seconds:
        prompt = random.integers(1, workload.VOCABULARY, kind.prompt)
        arrivals.append((at, name, prompt, kind.new))
    before = self.scheduler.stats()
    found, begin = [], time.perf_counter()
    for at, name, prompt, new in sorted(arrivals, key=lambda a: a[0]):
      time.sleep(max(begin + at - time.perf_counter(), 0))
      found.append((name, *self._submit(prompt, new)))
    for _, _, _, handle in found:
      handle.future.result(300)
    elapsed, after = time.perf_counter() - begin, self.scheduler.stats()
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

  def _submit(self, prompt, new: int):
    times: list[float] = []
    sampling = SamplingParams(new, temperature=0.0)
    start = time.perf_counter()
    handle = self.scheduler.submit(
      GenerateRequest(prompt, sampling),
      lambda _: times.append(time.perf_counter()),
    )
    return start, times, handle


def prefill(address: str) -> PrefillServer:
  cfg = model_config()
  variables = train_step.init_variables(cfg, jax.random.key(0))
  scheduler = PrefillScheduler(Engine(cfg, engine_config()), variables)
  return PrefillServer(scheduler, address, load=lambda version: variables).start()


def main() -> None:
  answers, sys.stdout = sys.stdout, sys.stderr
  server = None
  for line in sys.stdin:
    command = json.loads(line)
    do = command.pop('do')
    if do == 'prefill':
      server = prefill(**command)
      answer = {'address': server.address}
    elif do == 'make':
      server = Server(**command)
      answer = {'version': f'jax {jax.__version__}'}
      answer['local_tokens'] = server.scheduler.stats().get('local_tokens')
      if server.rates:
        answer['rates'] = dataclasses.asdict(server.rates)
    else:
      answer = server.play(**command)
    print(json.dumps(answer), file=answers, flush=True)
  if isinstance(server, PrefillServer):
    server.stop()


if __name__ == '__main__':
  main()
