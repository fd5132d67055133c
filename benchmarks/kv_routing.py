"""Policies that route agents' requests over engine replicas, in simulated time.

  python -m benchmarks.kv_routing                      # the table
  python -m benchmarks.kv_routing --sweep=replicas     # or groups, pages, swap_s
  python -m benchmarks.kv_routing --migration_gb_per_s=25
  python -m benchmarks.kv_routing --measure            # an engine on this machine

Claim: routing by cost keeps at least 97 % of the oracle's hit rate and has the lowest
99th percentile of the time to the first token of all policies, on average over seeds.

A batch of agent sessions (kv_routing_trace) is replayed through each policy, several
seeds. Router and replicas are the real code (kv_routing_cluster, kv_routing_engine);
only device calls are replaced by the time that they take. The oracle
(kv_routing_oracle) has one cache without bound and knows the true state of everything.
Best response makes the same choice with the replicas' real caches. Neither is a policy
that a router could use.

Times are those of M2 on --chips v5p chips a replica. They are assumed, not measured:
prompts, attention included, reach the share --mfu of the peak; a decode step moves all
weights, and the keys and values that it reads, at 0.8 of the bandwidth. With --measure
they are those of a small engine on this machine, and the sessions are scaled to it.

With --migration_gb_per_s pages of a prefix may be moved between replicas, at that speed
of one sender and of one receiver; only the cost-aware policy chooses to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics

from benchmarks import harness, kv_routing_measure
from benchmarks.kv_routing_cluster import Cluster, ClusterConfig, summary
from benchmarks.kv_routing_engine import Times
from benchmarks.kv_routing_oracle import best_response
from benchmarks.kv_routing_trace import TraceConfig, sessions
from benchmarks.kv_routing_trace import statistics as trace_statistics
from m2jax import config as config_lib
from m2jax.plan.chips import CHIPS
from m2jax.plan.efficiency import CALIBRATED
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.routing.policies import POLICIES
from m2jax.rollout.serving.config import SchedulerConfig

ORACLES = ('best_response', 'oracle')
_CALL_S = 2e-3  # of a call besides the device's work
_TITLES = {
  'hit_rate': 'hit rate',
  'ttft_p50_s': 'TTFT p50 s',
  'ttft_p99_s': 'TTFT p99 s',
  'tokens_per_s': 'tokens/s',
  'balance': 'balance',
  'computed_share': 'computed',
  'predicted': 'expected hits',
}


def m2_cluster(args: argparse.Namespace) -> ClusterConfig:
  """Replicas of M2 in bf16 on v5p chips."""
  cfg = config_lib.m2()
  chip = next(chip for chip in CHIPS if chip.name == 'v5p')
  flops = args.chips * chip.peak_flops * args.mfu
  bandwidth = args.chips * chip.hbm_bandwidth * CALIBRATED.hbm
  token_bytes = 2 * 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim
  attention = 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim
  experts = 3 * cfg.embed_dim * cfg.expert_dim * cfg.num_layers
  heads = (2 * cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
  dense = cfg.num_layers * cfg.embed_dim * heads
  total = dense + experts * cfg.num_experts + 2 * cfg.vocab_size * cfg.embed_dim
  active = dense + experts * cfg.experts_per_token
  free = args.chips * chip.hbm_bytes * args.cache_share - 2 * total
  pages = args.pages or int(free / token_bytes / args.page_tokens)
  engine = EngineConfig(
    slots=args.slots,
    context_tokens=args.context_tokens,
    page_tokens=args.page_tokens,
    pages=pages,
    max_steps=args.decode_steps,
    decode_rows=(args.slots,),
    prefill_shapes=((1, 512), (1, 2048), (1, 8192), (4, 1024)),
    contexts=(args.context_tokens,),
  )
  return ClusterConfig(
    replicas=args.replicas,
    engine=engine,
    scheduler=SchedulerConfig(args.decode_steps, args.budget_tokens),
    times=Times(
      prefill_call_s=_CALL_S,
      prefill_token_s=2 * active / flops,
      prefill_position_s=attention / flops,
      decode_call_s=_CALL_S,
      step_s=2 * total / bandwidth,
      row_s=0.0,
      position_s=token_bytes / bandwidth,
    ),
    token_bytes=token_bytes,
    migration_bytes_per_s=args.migration_gb_per_s * 1e9,
    swap_s=args.swap_s,
    in_flight=args.in_flight,
  )


def replay(name: str, cluster: ClusterConfig, traces, seed: int) -> dict[str, float]:
  """Replays the sessions under a policy or an oracle."""
  if name in ORACLES:
    run = Cluster(
      cluster,
      traces,
      best_response,
      shared=name == 'oracle',
      global_knowledge=True,
      seed=seed,
    )
  else:
    run = Cluster(cluster, traces, POLICIES[name], seed=seed)
  found = summary(run.run())
  tokens = sum(len(turn.prompt) for session in traces for turn in session.turns)
  return {'policy': name, **found, 'computed_share': found['computed_tokens'] / tokens}


def compare(args, cluster: ClusterConfig, trace: TraceConfig) -> list[dict]:
  """A row for each policy and seed."""
  out = []
  for seed in args.seeds:
    drawn = sessions(dataclasses.replace(trace, seed=seed))
    for name in args.policies:
      out.append({'seed': seed, **replay(name, cluster, drawn, seed)})
  return out


def means(rows: list[dict]) -> list[dict]:
  """A row for each policy: means over the seeds, and some ranges.

  `hit_of_oracle` is the hit rate over the oracle's with the same seed.
  """
  oracle = {r['seed']: r['hit_rate'] for r in rows if r['policy'] == 'oracle'}
  out = []
  for name in dict.fromkeys(row['policy'] for row in rows):
    mine = [dict(row) for row in rows if row['policy'] == name]
    for row in mine:
      if row['seed'] in oracle:
        row['hit_of_oracle'] = row['hit_rate'] / oracle[row['seed']]
    mean = {'policy': name}
    for key in mine[0]:
      if key not in ('policy', 'seed'):
        mean[key] = statistics.fmean(row[key] for row in mine)
    for key in ('hit_rate', 'ttft_p99_s', 'hit_of_oracle'):
      if key in mine[0]:
        values = [row[key] for row in mine]
        mean[f'{key}_range'] = [min(values), max(values)]
    out.append(mean)
  return out


def table(rows: list[dict]) -> str:
  """Markdown; p99 with its range over the seeds."""
  lines = []
  for row in rows:
    low, high = row['ttft_p99_s_range']
    cells = [
      row['policy'].replace('_', '-'),
      f'{row["hit_rate"]:.1%}',
      f'{row["ttft_p50_s"]:.2f}',
      f'{row["ttft_p99_s"]:.2f} ({low:.2f}–{high:.2f})',
      f'{row["tokens_per_s"]:,.0f}',
      f'{row["balance"]:.2f}',
      f'{row["computed_share"]:.1%}',
      '' if row['policy'] in ORACLES else f'{row["predicted"]:.1%}',
    ]
    lines.append(cells)
  return harness.markdown(['policy', *_TITLES.values()], lines)


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  numbers = lambda text: [float(x) if '.' in text else int(x) for x in text.split(',')]
  names = lambda text: text.split(',')
  add('--policies', type=names, default=[*POLICIES, *ORACLES])
  add('--seeds', type=numbers, default=[0, 1, 2])
  add('--replicas', type=int, default=4)
  add('--groups', type=int, default=6, help='of 16 sessions')
  add('--in_flight', type=int, default=0, help='groups at a time; 0: all')
  add('--response_tokens', type=float, default=250, help='mean')
  add('--system_tokens', type=int, default=6000, help="of a group's first prompt")
  add('--tool_s', type=float, default=3.0, help='median')
  add('--edits', type=float, default=0.07, help='share of turns')
  add('--swap_s', type=float, default=0.0, help='between new weights; 0: none')
  add('--migration_gb_per_s', type=float, default=0.0, help='0: none')
  add('--chips', type=int, default=8, help='v5p, of a replica')
  add('--mfu', type=float, default=0.3, help='of prompts')
  add('--cache_share', type=float, default=0.9, help='of HBM, weights and cache')
  add('--pages', type=int, default=0, help='of a replica; 0: what the chips hold')
  add('--page_tokens', type=int, default=128)
  add('--slots', type=int, default=64)
  add('--context_tokens', type=int, default=131072)
  add('--decode_steps', type=int, default=8)
  add('--budget_tokens', type=int, default=8192, help='prefill between decode calls')
  add('--sweep', choices=['replicas', 'groups', 'pages', 'swap_s'])
  add('--values', type=numbers, help='of --sweep')
  add('--measure', action='store_true', help='an engine on this machine')
  add('--json', action='store_true', help='print JSON')
  return parser.parse_args()


def main():
  args = _arguments()
  defaults = dict(
    replicas=[2, 3, 6, 16], groups=[3, 9], pages=[5000, 10000], swap_s=[300.0, 100.0]
  )
  values = args.values or defaults.get(args.sweep, [None])
  results = []
  for value in values:
    if args.sweep:
      setattr(args, args.sweep, value)
    trace = TraceConfig(
      groups=args.groups,
      system_tokens=args.system_tokens,
      response_tokens=args.response_tokens,
      tool_s=args.tool_s,
      edits=args.edits,
      context_tokens=args.context_tokens,
      page_tokens=args.page_tokens,
    )
    cluster = m2_cluster(args)
    if args.measure:
      cluster, trace = kv_routing_measure.scaled(cluster, trace)
    drawn = trace_statistics(trace, sessions(trace))
    rows = means(compare(args, cluster, trace))
    setting = {args.sweep: value} if args.sweep else {}
    results.append(
      dict(
        **setting,
        trace=drawn,
        times=dataclasses.asdict(cluster.times),
        replicas=cluster.replicas,
        pages=cluster.engine.pages,
        rows=rows,
      )
    )
    if args.json:
      continue
    print(*(f'{key} {value}' for key, value in setting.items()))
    print('sessions of the first seed:', _line(drawn))
    print('times, s:', _line(dataclasses.asdict(cluster.times)))
    print(f'{cluster.replicas} replicas of {cluster.engine.pages:,} pages\n')
    print(table(rows), flush=True)
    print()
  if args.json:
    print(json.dumps(results, indent=2))


def _line(values: dict[str, float]) -> str:
  return ', '.join(f'{key} {value:.4g}' for key, value in values.items())


if __name__ == '__main__':
  main()
