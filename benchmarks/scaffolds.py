"""What SFT on several scaffolds and on verified attempts is worth.

  python -m benchmarks.scaffolds --workdir=DIR [--seeds 0 1 2] [--json]

A small model learns repair tasks (`m2jax_pipelines.tasks.repair`), four times for each
seed:

  one        SFT on the teacher's demonstrations in one scaffold
  perturbed  the same demonstrations and budget, system prompt, instruction and names of
             tools drawn from a list for each task (the agent kind `perturbed`)
  verified   after `perturbed`: it attempts training tasks in that list and in the one
             scaffold; SFT continues with the attempts that the verifier accepts
  more       after `perturbed`: SFT continues with as many new demonstrations of the
             teacher, for as many steps; the control of `verified`

Each is evaluated at temperature 1 on held-out tasks in three scaffolds: the one, the
list, and prompts and names that no arm was trained with. Prints medians over seeds with
their range. Runs resume, and measurements in DIR are not repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from benchmarks import harness
from configs import forge as forge_config
from experiments import common, fields, served
from m2jax import agents
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax.forge.roles import in_process
from m2jax.gateway.config import GatewayConfig
from m2jax.sharding import ONE_DEVICE
from m2jax_pipelines import records, suites, verified

ARMS = ('one', 'perturbed', 'verified', 'more')
_WHITEBOX = dict(kind='whitebox', max_tokens=96)
ONE = dict(_WHITEBOX, system='Use the tools.')
LIST = dict(
  kind='perturbed',
  agent=_WHITEBOX,
  systems=('Use the tools.', 'You repair code.', 'Work step by step.', ''),
  instructions=('{instruction}', 'Your task: {instruction}', 'Hello. {instruction}'),
  renames=(
    {},
    dict(read='show', edit='replace', test='run'),
    dict(read='open', edit='change', test='check', old='before', new='after'),
  ),
)
OTHER = dict(
  kind='perturbed',
  agent=_WHITEBOX,
  systems=('You are a careful engineer.', 'Mend the file.'),
  instructions=('{instruction} Thanks.', 'Please do this. {instruction}'),
  renames=(
    dict(read='cat', edit='swap', test='try'),
    dict(read='view', edit='write', test='call', old='from', new='to'),
  ),
)
SCAFFOLDS = {'one': ONE, 'list': LIST, 'other': OTHER}


def config(arm: str, seed: int, args) -> ml_collections.ConfigDict:
  """The main job's config with a smaller model, repairs, and no RL."""
  c = forge_config.get_config()
  c.seed = seed
  c.model.update(num_layers=args.layers, embed_dim=96, num_heads=6, num_kv_heads=2)
  c.model.update(head_dim=16, rotary_dim=8, num_experts=4, expert_dim=96)
  c.model.update(vocab_size=384, num_mtp_modules=0)
  c.mesh.update(expert=1)
  c.tasks = dict(kind='repair', steps=(1, args.steps))
  c.teacher = dict(kind='repair')
  c.engine.update(slots=32, decode_rows=(32,), contexts=(768,))
  c.engine.update(prefill_shapes=((8, 64),))
  c.episodes.concurrency = 32
  c.episodes.agent = ONE if arm == 'one' else LIST
  c.eval_tasks = c.dev_tasks = 0
  c.sft.families = {}
  c.sft.update(demonstrations=args.demonstrations, row_tokens=1024)
  c.sft.update(tokens_per_step=args.tokens)
  steps = args.sft_steps
  if arm in ('verified', 'more'):
    base = args.workdir / f'perturbed-{seed}'
    c.init_from, steps = str(base), args.more_steps
    verified_path = args.workdir / f'sample-{seed}' / 'verified.jsonl'
    kept = len(verified_path.read_text().splitlines())
    c.sft.demonstrations = kept
    if arm == 'verified':
      c.sft.recorded = str(verified_path)
    else:
      c.seed = seed + 1000  # other tasks
    lower_rates(c)
  set_steps(c, steps)
  c.sft.step.update(micro_rows=1)
  c.rl = None
  return fields.complete(c, ForgeConfig)


def lower_rates(c: ml_collections.ConfigDict) -> None:
  """Learning rates with which SFT continues from trained weights."""
  c.sft.optimizer.muon.learning_rate = 5e-3
  c.sft.optimizer.adam.learning_rate = 5e-4


def set_steps(c: ml_collections.ConfigDict, steps: int) -> None:
  c.sft.loop.update(steps=steps, checkpoint_every=steps)
  c.sft.optimizer.schedule.update(total_steps=steps, decay_steps=steps // 3)


@contextlib.contextmanager
def served_at(built: ForgeConfig, workdir: pathlib.Path) -> Iterator[Any]:
  """The gateway on a run's last weights."""
  found = served.load(workdir, None, ONE_DEVICE)
  tok = found.load_tokenizer()
  gateway = dataclasses.replace(built.gateway, accept_unknown_keys=True)
  with (
    served.engine(found, built.engine, ONE_DEVICE) as engine,
    in_process.serving(
      *(engine, built.scheduler, gateway, found.variables, tok),
      lambda completion: None,
    ) as (_, server),
  ):
    yield server


def suite(built: ForgeConfig, scaffold: str, **changes) -> suites.SuiteConfig:
  agent = common.build(agents.AgentConfig, SCAFFOLDS[scaffold], scaffold)
  defaults = dict(top_p=1.0, top_k=0, concurrency=32, seed=1)
  return suites.SuiteConfig(tasks=built.tasks, agent=agent, **(defaults | changes))


def attempts(server, config: suites.SuiteConfig, path: pathlib.Path) -> list:
  """Records of the attempts; what is not judged is tried again.

  Raises:
    RuntimeError: some are not judged after three tries.
  """
  model = GatewayConfig().model_name
  for _ in range(3):
    asyncio.run(suites.run(config, server.base_url, model, path, api_key='benchmark'))
    last = {(row['task'], row['trial']): row for row in records.read(path)}
    lost = [row for row in last.values() if row['outcome'] != 'judged']
    if not lost:
      return list(last.values())
  raise RuntimeError(f'{len(lost)} attempts are not judged: {lost[-1]["error"]}')


def measure(arm: str, seed: int, args) -> dict[str, Any]:
  """One arm, resumed if it was interrupted."""
  started, workdir = time.monotonic(), args.workdir / f'{arm}-{seed}'
  if arm in ('verified', 'more'):
    sample(seed, args)
  built = common.build(ForgeConfig, config(arm, seed, args))
  run.run(built, workdir)
  success = {}
  with served_at(built, workdir) as server:
    for scaffold in SCAFFOLDS:
      wanted = suite(built, scaffold, split='held_out', count=args.tasks, trials=1)
      rows = attempts(server, wanted, workdir / f'held_out_{scaffold}.jsonl')
      success[scaffold] = [sum(row['success'] for row in rows), len(rows)]
  print(f'seed {seed}, {arm}: {time.monotonic() - started:.0f} s', file=sys.stderr)
  return {
    'arm': arm,
    'seed': seed,
    'chats': built.sft.demonstrations,
    'success': success,
  }


def sample(seed: int, args) -> None:
  """Attempts of the `perturbed` arm at training tasks; the verified ones are kept."""
  directory = args.workdir / f'sample-{seed}'
  if (directory / 'verified.jsonl').exists():
    return
  directory.mkdir(parents=True, exist_ok=True)
  built = common.build(ForgeConfig, config('perturbed', seed, args))
  suites_of = {
    name: suite(built, name, split='train', count=args.attempted, trials=args.trials)
    for name in ('one', 'list')
  }
  with served_at(built, args.workdir / f'perturbed-{seed}') as server:
    rows = {
      name: attempts(server, found, directory / f'{name}.jsonl')
      for name, found in suites_of.items()
    }
  wanted = verified.SampleConfig(
    suite=suites_of['one'],
    scaffolds={name: found.agent for name, found in suites_of.items()},
    thinking=True,
  )
  chats = verified.select(wanted, rows, f'perturbed-{seed}').chats
  verified.write(directory / 'verified.jsonl', chats)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
  lines = ['| SFT | chats | ' + ' | '.join(SCAFFOLDS) + ' |', '|---|---|---|---|---|']
  for arm in ARMS:
    own = [r for r in runs if r['arm'] == arm]
    chats = statistics.median(r['chats'] for r in own)
    cells = []
    for scaffold in SCAFFOLDS:
      rates = [100 * r['success'][scaffold][0] / r['success'][scaffold][1] for r in own]
      cells.append(harness.spread(rates))
    lines.append(f'| {arm} | {chats:.0f} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--layers', type=int, default=2)
  parser.add_argument('--steps', type=int, default=2, help='most, of a program')
  parser.add_argument('--demonstrations', type=int, default=1500)
  parser.add_argument('--tokens', type=int, default=4096, help='of an SFT step')
  parser.add_argument('--sft_steps', type=int, default=1500)
  parser.add_argument('--more_steps', type=int, default=300)
  parser.add_argument('--attempted', type=int, default=300, help='training tasks')
  parser.add_argument('--trials', type=int, default=2, help='of each, in a scaffold')
  parser.add_argument('--tasks', type=int, default=200, help='held out')
  harness.run(parser.parse_args(), ARMS, measure, table)


if __name__ == '__main__':
  main()
