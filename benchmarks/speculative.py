"""Measures speculative decoding with MTP modules: tokens/s by batch size and drafts.

  python -m benchmarks.speculative --workdir=DIR [--json]
  python -m benchmarks.speculative --agreeing=0.3

A small M2 with three MTP modules is pre-trained on Python's standard library (the model
and the modules together, as `pretrain.fit` does; a later run continues from the
checkpoints in DIR/pretrain). With --agreeing=NOISE nothing is trained: the model is
that of `benchmarks.rollout` (13.5M parameters without modules), random, but constructed
so that modules and trunk mostly agree. This shows the speed, at the acceptance in the
table, of a model whose steps for few rows mostly read weights. A module costs as much
as a layer, so with --layers=16 its share is smaller than with 4.

Then batches of prompts from held-out files are served. The prompts of a batch arrive
together, and each draws --new tokens:

  0         by an engine without modules: the baseline
  1, 2, 3   with that number of drafts in every step
  adaptive  with the number that `serving.drafting` chooses, in brackets
            at the end

All sides take turns in each of --rounds rounds, so that other load on the machine
affects all; the first is not counted. Prints medians of tokens/s, and of the ratio to
the baseline of the same round; the share of drafts accepted at each position, given
that those before it were accepted; and the break-even point, the largest measured batch
at which a fixed number of drafts is faster than none. Prefill is included, on every
side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import expand_mtp, rollout_worker
from m2jax import config as model_config
from m2jax.checkpoint import CheckpointManager
from m2jax.config import ModelConfig
from m2jax.observe.metrics import MetricsWriter
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.train import pretrain
from m2jax.train import step as train_step
from m2jax.train.loop import Run

_CHECKPOINT_EVERY = 25  # training steps
MODULES, PLAIN, ADAPTIVE = 3, '0', 'adaptive'
SIDES = (PLAIN, *map(str, range(1, MODULES + 1)), ADAPTIVE)


def model(layers: int) -> ModelConfig:
  return dataclasses.replace(
    model_config.tiny(),
    num_layers=layers,
    vocab_size=expand_mtp.VOCABULARY,
    num_mtp_modules=MODULES,
  )


def trained(args, workdir: pathlib.Path):
  """The model's config, weights, and held-out token arrays."""
  train, held_out = expand_mtp.read(args.files)
  cfg, settings = model(args.layers or 8), expand_mtp.settings(args.steps)
  loop = dataclasses.replace(settings.loop, checkpoint_every=_CHECKPOINT_EVERY)
  settings = dataclasses.replace(settings, loop=loop)
  with (
    CheckpointManager(workdir / 'pretrain') as manager,
    MetricsWriter(workdir / 'pretrain', use_tensorboard=False) as metrics,
  ):
    run = Run('pretrain', manager, metrics)
    return cfg, pretrain.fit(settings, cfg, [train], run, seed=0).variables, held_out


def agreeing(cfg: ModelConfig, variables, noise: float):
  """Weights of which modules and trunk predict much the same, without noise the same.

  Blocks add little, so that the next token depends on the last one alone; a module
  reads that token's embedding.
  """
  params = dict(variables['params'])
  quiet = lambda p: {**p, 'o': p['o'] * noise, 'down': p['down'] * noise}
  mtp = dict(params['mtp'], layers=quiet(params['mtp']['layers']))
  hidden = mtp['proj'][:, : cfg.embed_dim] * noise
  passed = jnp.broadcast_to(jnp.eye(cfg.embed_dim, dtype=hidden.dtype), hidden.shape)
  mtp['proj'] = jnp.concatenate([hidden, passed], axis=1)
  mtp['embed_norm'] = jnp.ones_like(mtp['embed_norm'])
  return {
    **variables,
    'params': {**params, 'layers': quiet(params['layers']), 'mtp': mtp},
  }


def untrained(args):
  """What `trained` returns, of random weights."""
  cfg = rollout_worker.model_config()
  cfg = dataclasses.replace(
    cfg, num_layers=args.layers or cfg.num_layers, num_mtp_modules=MODULES
  )
  variables = train_step.init_variables(cfg, jax.random.key(0))
  params = variables['params']
  # Logits that spread over some nats, as a trained model's do.
  spread = dict(params, embed=params['embed'] * 50, head=params['head'] * 10)
  variables = agreeing(cfg, {**variables, 'params': spread}, args.agreeing)
  texts = np.random.default_rng(0).integers(1, cfg.vocab_size, (99, 2 * args.prompt))
  return cfg, variables, list(texts)


class Side:
  """One way to decode, with an engine and a scheduler of its own.

  Attributes:
    drafts: tokens drafted in each step; None lets the scheduler choose.
  """

  def __init__(self, engine: Engine, variables, drafts: int | None):
    self.drafts, self.rows = drafts, engine.config.slots
    config = SchedulerConfig(prefill_budget_tokens=4096, draft_tokens=drafts)
    self.scheduler = Scheduler(engine, variables, config=config).start()

  def batch(self, prompts: Sequence[np.ndarray], args) -> dict[str, float]:
    """Serves the prompts; tokens, seconds and the counts of drafts."""
    before, started = self.scheduler.stats(), time.perf_counter()
    handles = [
      self.scheduler.submit(
        GenerateRequest(
          prompt, SamplingParams(args.new, temperature=args.temperature, seed=i)
        )
      )
      for i, prompt in enumerate(prompts)
    ]
    tokens = sum(len(handle.future.result().tokens) for handle in handles)
    seconds, after = time.perf_counter() - started, self.scheduler.stats()
    drafts = {key: after[key] - before[key] for key in _COUNTS}
    return {'tokens': tokens, 'seconds': seconds, **drafts}


_COUNTS = ('drafted_tokens', 'accepted_tokens')


def sides(cfg: ModelConfig, variables, rows: int, args) -> dict[str, Side]:
  context = args.prompt + args.new + 32
  config = EngineConfig(
    slots=rows,
    context_tokens=context,
    decode_rows=(rows,),
    prefill_shapes=((rows, args.prompt),),
    contexts=(context,),
  )
  plain = Engine(cfg, config)
  drafting = Engine(cfg, dataclasses.replace(config, draft_tokens=MODULES))
  made = {PLAIN: Side(plain, variables, 0)}
  for drafts in range(1, MODULES + 1):
    made[str(drafts)] = Side(drafting, variables, drafts)
  return {**made, ADAPTIVE: Side(drafting, variables, None)}


def serve(cfg: ModelConfig, variables, held_out, rows: int, args) -> list[dict]:
  """One dict per side: tokens/s of each round, and outcomes of the drafts."""
  random = np.random.default_rng(0)
  texts = [t for t in map(np.asarray, held_out) if len(t) > args.prompt]
  made = sides(cfg, variables, rows, args)
  found = {name: [] for name in made}
  for _ in range(args.rounds):
    chosen = random.choice(len(texts), rows)
    starts = [random.integers(len(texts[i]) - args.prompt) for i in chosen]
    prompts = [
      texts[i][at : at + args.prompt] for i, at in zip(chosen, starts, strict=True)
    ]
    for name, side in made.items():
      found[name].append(side.batch(prompts, args))
  out = []
  for name, side in made.items():
    counted = found[name][1:]
    drafting = side.scheduler.drafting
    total = lambda key, counted=counted: sum(answer[key] for answer in counted)
    speeds = [answer['tokens'] / answer['seconds'] for answer in counted]
    out.append(
      {
        'rows': rows,
        'side': name,
        'tokens_per_s': speeds,
        'acceptance': drafting.acceptance.tolist() if name != PLAIN else [],
        'accepted': total('accepted_tokens'),
        'drafted': total('drafted_tokens'),
        'mean_accepted_length': side.scheduler.stats()['mean_accepted_length'],
        'drafts_at_end': drafting.best(rows) if side.drafts is None else side.drafts,
      }
    )
    side.scheduler.stop()
  return out


def ratios(found: Sequence[Mapping[str, Any]], rows: int, name: str) -> list[float]:
  """Speed over the baseline's, of each round."""
  speeds = {r['side']: r['tokens_per_s'] for r in found if r['rows'] == rows}
  return [a / b for a, b in zip(speeds[name], speeds[PLAIN], strict=True)]


def break_even(found: Sequence[Mapping[str, Any]]) -> int:
  """The largest batch at which a fixed number of drafts beats none; 0 if at none."""
  fixed = [name for name in SIDES if name not in (PLAIN, ADAPTIVE)]
  return max(
    (
      rows
      for rows in {r['rows'] for r in found}
      if max(statistics.median(ratios(found, rows, name)) for name in fixed) > 1
    ),
    default=0,
  )


def table(found: Sequence[Mapping[str, Any]]) -> str:
  """tokens/s and ratios by batch size; acceptance by position."""
  heads = [f'{n} drafts' if n.isdigit() else n for n in SIDES]
  lines = ['| requests | ' + ' | '.join(heads) + ' | accepted at 1, 2, 3 | tokens |']
  lines.append('|---|' + '---|' * (len(SIDES) + 2))
  for rows in sorted({r['rows'] for r in found}):
    mine = {r['side']: r for r in found if r['rows'] == rows}
    cells = []
    for name in SIDES:
      cell = f'{statistics.median(mine[name]["tokens_per_s"]):.0f}'
      if name != PLAIN:
        cell += f' ({statistics.median(ratios(found, rows, name)):.2f})'
      if name == ADAPTIVE:
        cell += f' [{mine[name]["drafts_at_end"]}]'
      cells.append(cell)
    most = mine[str(MODULES)]
    cells.append(', '.join(f'{share:.2f}' for share in most['acceptance']))
    cells.append(f'{most["mean_accepted_length"]:.2f}')
    lines.append(f'| {rows} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--workdir', type=pathlib.Path)
  parser.add_argument('--agreeing', type=float, help='noise; nothing is trained')
  parser.add_argument('--layers', type=int, help='of the trunk; by default 8, or 4')
  parser.add_argument('--steps', type=int, default=150, help='of training')
  parser.add_argument('--files', type=int, default=400, help='to train on')
  parser.add_argument('--requests', type=int, nargs='+', default=[1, 4, 16, 64])
  parser.add_argument('--prompt', type=int, default=64, help='tokens')
  parser.add_argument('--new', type=int, default=96, help='tokens of a response')
  parser.add_argument('--temperature', type=float, default=1.0)
  parser.add_argument('--rounds', type=int, default=6, help='the first warms up')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  started, found = time.monotonic(), []
  if args.agreeing is not None:
    cfg, variables, held_out = untrained(args)
  elif args.workdir:
    cfg, variables, held_out = trained(args, args.workdir)
  else:
    parser.error('one of --workdir and --agreeing')
  print(f'weights: {time.monotonic() - started:.0f} s', file=sys.stderr)
  for rows in args.requests:
    found += serve(cfg, variables, held_out, rows, args)
    print(f'{rows} requests: {time.monotonic() - started:.0f} s', file=sys.stderr)
  if args.json:
    settings = {**vars(args), 'workdir': str(args.workdir)}
    result = {'settings': settings, 'break_even': break_even(found), 'served': found}
    print(json.dumps(result, indent=1))
    return
  print(table(found))
  print(
    f'\ntokens/s, and in brackets the median ratio to no drafts; accepted: shares of '
    f'the drafts at each position with {MODULES} drafts, and tokens a verification '
    f'gives. Drafts are faster than none up to {break_even(found)} requests.'
  )


if __name__ == '__main__':
  main()
