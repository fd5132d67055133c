r"""Mixed-domain RL against RL on one domain: what each gains and forgets.

  python -m benchmarks.mixed_domains --workdir=DIR [--seeds 0 1 2] [--alone shell] \
    [--json]

Runs `configs/forge_mixed.py` without its second scaffold, with a smaller budget, and
with the engine's context in both stages. Each seed has one SFT on the demonstrations of
all domains. RL then starts from its weights, once on all domains with the config's
ratios and once on each domain alone (`:DOMAIN`, `--alone`), for the same number of
updates and groups. Every policy is evaluated at temperature 1 on held-out tasks of all
domains. Prints medians over seeds with their range. Runs resume, and measurements in
DIR are not repeated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from benchmarks import harness
from configs import forge_mixed
from experiments import common, fields
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax.observe import evaluations
from m2jax.observe import metrics as metrics_lib

SFT, MIXED = 'sft', 'mixed'
LEFT_OUT = 'bash'  # shell tasks again
DOMAINS = tuple(name for name in forge_mixed.DOMAINS if name != LEFT_OUT)


def config(arm: str, seed: int, args) -> ml_collections.ConfigDict:
  """The job's config; arms after SFT start from its weights."""
  c = forge_mixed.get_config('' if arm in (SFT, MIXED) else arm)
  c.seed = seed
  c.model.update(num_mtp_modules=0)
  c.mesh.update(expert=1)
  for domains in (c.tasks.domains, c.episodes.agent.domains, c.teacher.domains):
    del domains[LEFT_OUT]
  c.episodes.agent.contexts = {}
  for shares in (c.tasks.ratios, c.tasks.demonstrated):
    for name in [n for n in shares if n.partition('/')[0] == LEFT_OUT]:
      del shares[name]
  c.engine.update(slots=32, decode_rows=(32,), contexts=(384, 768))
  c.engine.update(prefill_shapes=((8, 64),))
  c.episodes.concurrency = 32
  c.eval_tasks, c.dev_tasks = args.tasks * len(DOMAINS), 0
  c.sft.update(demonstrations=args.demonstrations, tokens_per_step=args.tokens)
  c.sft.loop.update(steps=args.sft_steps, checkpoint_every=-(-args.sft_steps // 4))
  c.sft.step.update(micro_rows=1)
  c.sft.optimizer.schedule.update(
    total_steps=args.sft_steps, decay_steps=args.sft_steps // 3
  )
  c.rl.update(steps=args.updates, dev_every=0, patience=0, checkpoint_every=7)
  c.rl.update(groups_per_step=args.groups, group_size=16, capacity=2 * args.groups)
  c.rl.refill_factor = 3.0
  c.rl.learner.step.update(micro_rows=1, detach_mtp=False)
  c.rl.optimizer.schedule.update(
    total_steps=args.updates, decay_steps=args.updates // 2
  )
  c.tasks.stages = (args.updates * args.groups,)
  if arm == SFT:
    c.rl = None
  else:
    c.start = str(args.workdir / f'{SFT}-{seed}')
  return fields.complete(c, ForgeConfig)


def measure(arm: str, seed: int, args) -> dict[str, Any]:
  """One run, resumed if it was interrupted."""
  started, workdir = time.monotonic(), args.workdir / f'{arm}-{seed}'
  run.run(common.build(ForgeConfig, config(arm, seed, args)), workdir)
  (row,) = evaluations.by_stage(metrics_lib.read(workdir))
  print(f'seed {seed}, {arm}: {time.monotonic() - started:.0f} s', file=sys.stderr)
  return {'arm': arm, 'seed': seed, 'families': row.families}


def cell(runs: Sequence[Mapping[str, Any]], family: str) -> str:
  """Median success in percent, and the range over seeds."""
  pairs = [r['families'][family] for r in runs if family in r['families']]
  if not pairs:
    return ''
  rates = [100 * successes / n for successes, n in pairs]
  return harness.spread(rates, 0)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
  """Arms by domains; then the domain `repair` by the size of its programs."""
  sizes = sorted({f for r in runs for f in r['families'] if f.startswith('repair/')})
  out = []
  for columns in (DOMAINS, sizes):
    lines = []
    for arm in dict.fromkeys(r['arm'] for r in runs):
      own = [r for r in runs if r['arm'] == arm]
      name = {SFT: 'none, after SFT', MIXED: 'all'}.get(arm, arm)
      lines.append([name, *(cell(own, c) for c in columns)])
    out.append(harness.markdown(['RL on', *columns], lines))
  return '\n\n'.join(out)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--demonstrations', type=int, default=4000)
  parser.add_argument('--tokens', type=int, default=2048, help='of an SFT step')
  parser.add_argument('--sft_steps', type=int, default=3000)
  parser.add_argument('--updates', type=int, default=28, help='of RL')
  parser.add_argument('--groups', type=int, default=8, help='of an update')
  parser.add_argument('--tasks', type=int, default=150, help='held out, of a domain')
  parser.add_argument(
    '--alone',
    nargs='*',
    choices=DOMAINS,
    default=DOMAINS,
    help='domains of one run each',
  )
  args = parser.parse_args()
  harness.run(args, (SFT, MIXED, *args.alone), measure, table, ['alone'])


if __name__ == '__main__':
  main()
