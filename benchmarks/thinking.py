"""What keeping the thinking of earlier turns in the context is worth.

  python -m benchmarks.thinking --workdir=DIR [--seeds 0 1 2] [--json]

The main job without RL (`m2jax.forge.run`: demonstrations, SFT, held-out evaluation) on
lookups (`m2jax_pipelines.tasks.lookup`): the model follows a chain of keys and answers
with the sum of what it found, modulo 5. The demonstrations' thinking carries the
running total. No observation has it, but each has its number, so that it can be
computed again. The job runs twice for each seed, with the same demonstrations, weights,
budget and tasks:

  kept      prompts contain the thinking of all turns, as M2's template has it
  dropped   prompts contain none of earlier turns, in SFT and the evaluation

Dropping gives each turn a prompt of its own. In SFT their common prefixes are computed
once (`data.packing.SampleBatches`), so that a step of both costs the same.

Each is also evaluated the other way: weights trained with the thinking of earlier turns
on prompts without it, and the reverse. Prints medians over seeds with their range:
success at temperature 1 on held-out tasks, by the length of the chain. Runs resume, and
measurements in DIR are not repeated. `benchmarks.claims --claim=thinking` has RL.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from benchmarks import harness
from configs import forge as forge_config
from experiments import common, fields, served
from m2jax.forge import evaluation, run
from m2jax.forge.config import ForgeConfig
from m2jax.forge.roles import in_process
from m2jax.observe import evaluations
from m2jax.observe import metrics as metrics_lib
from m2jax.pool.data_pool import DataPool
from m2jax.sharding import ONE_DEVICE

SIDES = {'kept': 'keep', 'dropped': 'drop'}


def config(side: str, seed: int, args) -> ml_collections.ConfigDict:
  """The main job's config, with a smaller model and the lookups."""
  c = forge_config.get_config()
  c.seed = seed
  c.model.update(num_layers=args.layers, embed_dim=96, num_heads=6, num_kv_heads=2)
  c.model.update(head_dim=16, rotary_dim=8, num_experts=4, expert_dim=96)
  c.model.update(vocab_size=512, max_positions=768, num_mtp_modules=0)
  c.mesh.update(data=1)
  c.tasks = dict(kind='lookup', hops=(2, args.hops))
  c.teacher = dict(kind='lookup')
  c.engine.update(
    slots=32,
    context_tokens=768,
    decode_rows=(32,),
    contexts=(384, 768),
    prefill_shapes=((8, 64),),
  )
  c.episodes.update(concurrency=32)
  c.episodes.agent = dict(
    kind='whitebox', max_tokens=96, context=dict(thinking=SIDES[side])
  )
  c.eval_tasks, c.dev_tasks = args.tasks, 0
  c.sft.families = {}
  c.sft.update(demonstrations=args.demonstrations, row_tokens=1024)
  c.sft.update(tokens_per_step=args.tokens)
  c.sft.loop.update(steps=args.sft_steps, checkpoint_every=-(-args.sft_steps // 4))
  c.sft.step.update(micro_rows=1)
  c.sft.optimizer.schedule.update(
    total_steps=args.sft_steps, decay_steps=args.sft_steps // 3
  )
  c.rl = None
  return fields.complete(c, ForgeConfig)


def other_way(built: ForgeConfig, workdir: pathlib.Path) -> dict[str, Any]:
  """Success of a run's last weights with the other way of prompting."""
  agent = built.episodes.agent
  thinking = 'drop' if agent.context.thinking == 'keep' else 'keep'
  context = dataclasses.replace(agent.context, thinking=thinking)
  agent = dataclasses.replace(agent, context=context)
  episodes = dataclasses.replace(built.episodes, agent=agent)
  built = dataclasses.replace(built, episodes=episodes)
  found = served.load(workdir, None, ONE_DEVICE)
  tok, url = found.load_tokenizer(), f'sqlite:///{workdir.absolute()}/other_way.db'
  with (
    DataPool(url) as pool,
    in_process.rollouts(built, found.variables, tok, pool) as running,
  ):
    tallies = evaluation.success_on(running, 'held_out', built.eval_tasks, 1.0)
  return {t.family: (t.successes, t.n) for t in tallies}


def measure(side: str, seed: int, args) -> dict[str, Any]:
  """One run, resumed if it was interrupted."""
  started, workdir = time.monotonic(), args.workdir / f'{side}-{seed}'
  built = common.build(ForgeConfig, config(side, seed, args))
  run.run(built, workdir)
  (row,) = evaluations.by_stage(metrics_lib.read(workdir))
  out = {
    'the same way': {'all': row.sampled, **row.families},
    'the other way': other_way(built, workdir),
  }
  print(f'seed {seed}, {side}: {time.monotonic() - started:.0f} s', file=sys.stderr)
  return {'side': side, 'seed': seed, 'success': out}


def table(runs: Sequence[Mapping[str, Any]], hops: int) -> str:
  parts = {'all': 'all'} | {f'hops_{n}': f'{n} calls' for n in range(2, hops + 1, 2)}
  heads = ('thinking', 'evaluated', *parts.values())
  lines = []

  def cell(side: str, how: str, part: str) -> str:
    pairs = [r['success'][how].get(part, (0, 0)) for r in runs if r['side'] == side]
    rates = [100 * successes / max(n, 1) for successes, n in pairs]
    return harness.spread(rates, 0)

  for side in SIDES:
    for how in ('the same way', 'the other way'):
      lines.append([side, how, *(cell(side, how, part) for part in parts)])
  return harness.markdown(heads, lines)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--layers', type=int, default=2)
  parser.add_argument('--hops', type=int, default=8, help='of the longest chains')
  parser.add_argument('--demonstrations', type=int, default=30_000)
  parser.add_argument('--tokens', type=int, default=4096, help='of an SFT step')
  parser.add_argument('--sft_steps', type=int, default=2000)
  parser.add_argument('--tasks', type=int, default=350, help='held out')
  args = parser.parse_args()
  harness.run(args, list(SIDES), measure, lambda runs: table(runs, args.hops))


if __name__ == '__main__':
  main()
