"""The oracle of `benchmarks.kv_routing`: what no router can know.

All replicas have one cache without bound, so that a prefix computed anywhere is cached
everywhere: the most hits that are possible. For each request every replica is played
forward from its true state (what is computed of each prompt, how many tokens each
response still gets, when the running tick ends, the true times of the calls), and the
replica with the earliest first token takes the request: the exhaustive best response to
the requests so far. Later requests and the limit of pages are not part of it; a best
response is not an optimal schedule, so another policy may have a lower tail.
"""

from __future__ import annotations

import numpy as np

from benchmarks.kv_routing_cluster import Cluster, SimulatedReplica
from benchmarks.kv_routing_trace import Turn
from m2jax.rollout.routing.policies import Choice
from m2jax.rollout.serving.sequences import State


def best_response(cluster: Cluster, turn: Turn) -> Choice:
  """The replica that would give the first token first."""
  times = [first_token_s(cluster, replica, turn) for replica in cluster.replicas]
  best = [i for i, time in enumerate(times) if time <= min(times) + 1e-9]
  loads = [len(cluster.replicas[i].batcher.jobs) for i in best]
  return Choice(best[int(np.argmin(loads))])


def first_token_s(cluster: Cluster, replica: SimulatedReplica, turn: Turn) -> float:
  """Seconds until a request would have its first token at a replica."""
  batcher, times = replica.batcher, cluster.config.times
  table, scheduler = batcher.table, batcher.config
  now = max(0.0, replica.tick_ends - cluster.now) if replica.ticking else 0.0
  decode = table.where(State.DECODE).tolist()
  left = [replica.engine.left(slot) for slot in decode]
  positions = int(table.held[decode].sum())
  prefilling = table.where(State.PREFILL)
  prefilling = prefilling[np.argsort(table.started[prefilling])]
  # Prompts in the order in which they are computed: [start, end, response tokens].
  queue = []
  for slot in prefilling.tolist():
    response = replica.engine.responses[batcher.jobs[slot].seed]
    queue.append([int(table.held[slot]), int(table.target[slot]), len(response)])
  waiting = [
    (job.tokens, len(replica.engine.responses[job.seed]))
    for job in (*batcher.waiting, *replica.arrived)
  ]
  for tokens, response in [*waiting, (turn.prompt, len(turn.response))]:
    cached = len(table.caches[0].match(tokens[:-1])) * table.page_tokens
    queue.append([cached, len(tokens) - 1, response])
  slots = len(table.state)
  while True:
    budget = scheduler.prefill_budget_tokens
    while queue and budget > 0 and len(left) + 1 <= slots:
      start, end, response = queue[0]
      count = min(end - start, budget)
      reads = count * (2 * start + count + 1) // 2
      now += times.prefill(count, reads) if count else 0.0
      budget -= count
      queue[0][0] = start + count
      if start + count < end:
        break
      queue.pop(0)
      left.append(response)
      positions += end
    rows = batcher.engine.config.slots
    if not queue:  # ours gets its tokens at the end of this call
      return now + times.decode(min(scheduler.decode_steps, max(left)), rows, positions)
    steps = min(scheduler.decode_steps, max(left, default=0))
    if left:
      now += times.decode(steps, rows, positions)
    left = [n - steps for n in left if n > steps]
