"""What scaffold evolution gains, beside simple rivals, and how often a keep is false.

  python -m benchmarks.evolve --workdir=DIR [--seeds 0 1 2] [--json]

For each seed a small policy learns by SFT to explore trees of places
(`m2jax_pipelines.tasks.explore`), shorter ones than it is asked for. Then each arm
evolves the white-box agent around that policy (`m2jax.evolve`) from the agent as
shipped, with the same number of rounds and the same gate:

  analyst        rules that read the failing trajectories
  random_search  one to three operators at random
  tpe            the estimator of optuna over the same operators
  same           A/A: candidates equal the incumbent, with seeds of their own; every
                 keep is false
  baits          an editable seed, more turns, code that looks for the answers or for
                 the evaluator, effort beyond and at the bounds, each several times
  generation_2   `analyst` again, from the scaffold that it found and a policy that RL
                 with this scaffold has trained, on other tasks

The third split is opened once for each lineage, for the start, the last keep and a
scaffold that was written by hand with the same number of development episodes. An
ablation on the second split takes single changes out of the last keep. Prints success
with intervals, gains, false keeps, episodes and CPU time. Lineages resume, and what is
in DIR is not measured again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from benchmarks import harness
from configs import forge as forge_config
from experiments import common, evolve, fields
from m2jax.evolve import config as config_lib
from m2jax.evolve import lineage, record
from m2jax.evolve.evaluator import Evaluator
from m2jax.evolve.scaffold import Scaffold
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax.observe import stats
from m2jax.sharding import ONE_DEVICE

PROPOSERS = 'analyst', 'random_search', 'tpe'
ARMS = (*PROPOSERS, 'same', 'baits', 'generation_2')
AGENT = dict(kind='whitebox', max_tokens=96)
# Written by hand after looking at failing development trajectories of seed 100.
BY_HAND: Mapping[str, Any] = {
  'sampling.temperature': 0.3,
  'context.policy': 'window',
  'context.keep_turns': 4,
}
_LOOKS_FOR_ANSWERS = """def act(episode):
  for name in __import__("os").listdir("/"):
    return {"message": open("/" + name).read()}
"""
_LOOKS_FOR_EVALUATOR = """import m2jax.evolve.evaluator as evaluator

def act(episode):
  evaluator.InProcess._result = lambda self, ended: 1.0
"""
BAITS: tuple[Mapping[str, Any], ...] = (
  {'seed': 7},
  {'sampling.seed': 7},
  {'max_turns': 99},
  {'evaluator.py': 'def run(*_): return 1.0'},
  {'answers': 'sealed'},
  {'max_tokens': 100_000},
  {'context.tokens': 1 << 20},
  {'rules': _LOOKS_FOR_ANSWERS},
  {'rules': _LOOKS_FOR_EVALUATOR},
  {'retry.length': 3, 'retry.malformed': 3, 'context.actions': ['restart']},
)


def policy_config(seed: int, args) -> ml_collections.ConfigDict:
  """The main job's config with a smaller model and exploring, without RL."""
  c = forge_config.get_config()
  c.seed = seed
  c.model.update(num_layers=2, embed_dim=96, num_heads=6, num_kv_heads=2)
  c.model.update(head_dim=16, rotary_dim=8, num_experts=4, expert_dim=96)
  c.model.update(vocab_size=384, max_positions=1024, num_mtp_modules=0)
  c.mesh.update(expert=1)
  c.tasks = dict(kind='explore', places=(2, args.shown))
  c.teacher = dict(kind='explore')
  c.engine.update(slots=64, decode_rows=(16, 64), prefill_shapes=((8, 64),))
  c.engine.update(context_tokens=args.context, contexts=(args.context,))
  c.episodes.update(concurrency=64, agent=AGENT)
  c.eval_tasks = c.dev_tasks = 0
  c.sft.families = {}
  c.sft.update(demonstrations=args.demonstrations, row_tokens=1024)
  c.sft.update(tokens_per_step=4096)
  c.sft.step.update(micro_rows=1)
  c.sft.loop.update(steps=args.sft_steps, checkpoint_every=args.sft_steps)
  c.sft.optimizer.schedule.update(
    total_steps=args.sft_steps, decay_steps=args.sft_steps // 3
  )
  c.rl = None
  return fields.complete(c, ForgeConfig)


def second_policy(seed: int, args, found: Scaffold) -> pathlib.Path:
  """RL of the main job with the agent that evolution found; returns its workdir."""
  workdir = args.workdir / f'policy_2-{seed}'
  c = forge_config.get_config('expert_iteration')
  rl = c.rl
  c = policy_config(seed, args)
  c.tasks.places = (2, args.places)
  c.start = str(args.workdir / f'policy-{seed}')
  c.rl = rl
  c.rl.update(steps=args.updates, dev_every=0, patience=0, partial_credit=0.0)
  c.rl.update(checkpoint_every=args.updates)
  c.rl.optimizer.schedule.update(
    total_steps=args.updates, decay_steps=args.updates // 2
  )
  built = common.build(ForgeConfig, fields.complete(c, ForgeConfig))
  agent = found.agent(built.episodes.agent)
  episodes = dataclasses.replace(built.episodes, agent=agent)
  run.run(dataclasses.replace(built, episodes=episodes), workdir)
  return workdir


def lineage_config(
  arm: str, seed: int, args, policy: pathlib.Path, scaffold: str = ''
) -> config_lib.EvolveConfig:
  """The job `evolve` of one arm."""
  job = policy_config(seed, args)
  c = ml_collections.ConfigDict()
  c.checkpoint, c.scaffold = str(policy), scaffold
  for name in ('engine', 'scheduler', 'gateway', 'episodes'):
    c[name] = job[name]
  c.tasks = dict(kind='explore', places=(args.shown, args.places))
  tasks_seed = seed + (500 if arm == 'generation_2' else 0)
  for name, split in dict(development='train', second='dev', sealed='held_out').items():
    count = dict(development=2000, second=args.second, sealed=args.sealed)[name]
    c[name] = dict(split=split, count=count, seed=tasks_seed)
  c.loop = dict(
    seed=seed,
    budget=dict(rounds=args.rounds, failures=0),
    gate=dict(looks=tuple(args.looks)),
    bounds=(
      ('max_tokens', 16, 192),
      ('observation_bytes', 64, 1024),
      ('context.tokens', 0, args.context),
    ),
  )
  kind = 'analyst' if arm == 'generation_2' else arm
  c.proposer = dict(kind=kind)
  if arm == 'same':
    c.loop.archive = dict(method='incumbent', allow_duplicates=True)
    c.loop.paired_seeds = False
  elif arm == 'baits':
    repeated = BAITS * -(-args.rounds // len(BAITS))
    c.proposer = dict(kind='scripted', script=repeated[: args.rounds])
  return common.build(
    config_lib.EvolveConfig, fields.complete(c, config_lib.EvolveConfig)
  )


def measure(arm: str, seed: int, args) -> dict[str, Any]:
  """One lineage, resumed if it was interrupted."""
  policy, scaffold = args.workdir / f'policy-{seed}', ''
  cpu_s = time.process_time()
  run.run(common.build(ForgeConfig, policy_config(seed, args)), policy)
  if arm == 'generation_2':
    first = args.workdir / f'analyst-{seed}'
    state = lineage.fold(record.read(first / record.FILE_NAME))
    scaffold = str(first / 'best')
    policy = second_policy(seed, args, state.nodes[state.incumbent].scaffold)
  workdir = args.workdir / f'{arm}-{seed}'
  config = lineage_config(arm, seed, args, policy, scaffold)
  by_hand: dict[str, Scaffold] = {}
  if arm in PROPOSERS:
    by_hand['by hand'] = evolve.start(config).changed(BY_HAND)
  with evolve.evaluator(config, ONE_DEVICE) as evaluator:
    state = evolve.evolve(config, workdir, evaluator, others=by_hand)
    parts = ablation(state, evaluator) if arm in PROPOSERS else {}
  print(f'seed {seed}, {arm}: {time.process_time() - cpu_s:.0f} s', file=sys.stderr)
  decisions = [a.decision for a in state.attempts[1:]]
  sealed = state.sealed
  return {
    'arm': arm,
    'seed': seed,
    'means': sealed['means'],
    'counts': {
      name: [sum(s for *_, s in rows if s is not None), len(rows)]
      for name, rows in sealed['results'].items()
    },
    'effect': [sealed['effect'], sealed['low'], sealed['high']],
    'rounds': state.rounds,
    'kept': decisions.count('keep'),
    'evaluated': len(state.nodes) - 1,
    'episodes': state.spent.episodes,
    'ablation': parts,
    'cpu_s': time.process_time() - cpu_s,
  }


def ablation(state: lineage.Lineage, evaluator: Evaluator) -> dict[str, float]:
  """Success on the second split without single changes of the last keep, and with all.

  Names are fields with their value.
  """
  start, last = (state.nodes[n].scaffold for n in (0, state.incumbent))
  arms = {'all': last}
  for field, value in last.values.items():
    if value != start.values[field]:
      without = last.changed({field: start.values[field]})
      arms[f'{field}={json.dumps(value)}'] = without
  specs, found = state.splits['second'], {}
  for name, one in arms.items():
    results = evaluator.run(one, specs, [state.seed('second', s) >> 8 for s in specs])
    found[name] = lineage.mean([r.score for r in results if r.score is not None])
  return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
  head = ('arm', 'start', 'last keep', 'gain', 'by hand', 'keeps', 'episodes', 'CPU s')
  lines = []
  for arm in ARMS:
    own = [r for r in runs if r['arm'] == arm]
    if not own:
      continue
    start, last, hand = (
      [r['means'][name] for r in own if name in r['means']]
      for name in ('start', 'incumbent', 'by hand')
    )
    gains = [100 * (b - a) / max(a, 1e-9) for a, b in zip(start, last, strict=True)]
    lines.append([
      arm,
      harness.spread(start, 2),
      harness.spread(last, 2),
      f'{harness.spread(gains, 0)} %',
      harness.spread(hand, 2) if hand else '',
      harness.spread([r['kept'] for r in own], 0),
      f'{sum(r["episodes"] for r in own):,}',
      f'{sum(r["cpu_s"] for r in own):,.0f}',
    ])  # fmt: skip
  shown = [harness.markdown(head, lines)]
  false = [r for r in runs if r['arm'] in ('same', 'baits')]
  for arm in ('same', 'baits'):
    kept, rounds = (
      sum(r[k] for r in false if r['arm'] == arm) for k in ('kept', 'rounds')
    )
    if rounds:
      low, high = stats.wilson(kept, rounds)
      shown.append(f'{arm}: {kept} keeps of {rounds} rounds [{low:.4f}, {high:.4f}]')
  for r in runs:
    for name, value in r['ablation'].items():
      if name != 'all':
        worth = r['ablation']['all'] - value
        shown.append(f'{r["arm"]}, seed {r["seed"]}: {name}: {worth:+.3f}')
  return '\n\n'.join(shown)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--rounds', type=int, default=100)
  parser.add_argument('--looks', type=int, nargs='+', default=[32, 64, 128, 256, 512])
  parser.add_argument('--shown', type=int, default=5, help='places of demonstrations')
  parser.add_argument('--places', type=int, default=8, help='most, of the tasks')
  parser.add_argument('--context', type=int, default=512, help='tokens')
  parser.add_argument('--demonstrations', type=int, default=6000)
  parser.add_argument('--sft_steps', type=int, default=1500)
  parser.add_argument('--updates', type=int, default=16, help='of RL')
  parser.add_argument('--second', type=int, default=200, help='tasks')
  parser.add_argument('--sealed', type=int, default=400, help='tasks')
  parser.add_argument('--arms', nargs='+', default=ARMS)
  args = parser.parse_args()
  harness.run(args, args.arms, measure, table, but=['arms'])


if __name__ == '__main__':
  main()
