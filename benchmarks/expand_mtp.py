"""Is copying MTP modules better than random ones? Held-out loss of each module.

  python -m benchmarks.expand_mtp            # a table; --json for the numbers

A small M2 with one MTP module is pre-trained on this Python's own library. From that
one checkpoint each source of `train.expand_mtp` makes modules 2 and 3, which are
trained with the main model frozen and then jointly, on the same batches. Losses are in
nats per token of the run's own tokenizer, over the same held-out files; module k
predicts the token k + 1 ahead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sysconfig
import tempfile
import time

import jax
import jax.numpy as jnp

from m2jax import config as model_config
from m2jax import forest
from m2jax.checkpoint import CheckpointManager
from m2jax.data import corpus, documents, packing
from m2jax.observe.metrics import MetricsWriter
from m2jax.optim import OptimizerConfig
from m2jax.text import tokenizer
from m2jax.train import expand_mtp, pretrain, stages
from m2jax.train.loop import LoopConfig
from m2jax.train.step import StepConfig

CONTEXT, ROWS, VOCABULARY, MODULES = 256, 8, 1024, 3
TOKENS = CONTEXT * ROWS  # of a batch
STEP = StepConfig(micro_rows=ROWS)


def settings(steps: int) -> stages.PretrainConfig:
  """Training for so many steps: a warm-up, then a fall to a tenth."""
  tokens = steps * TOKENS
  return stages.PretrainConfig(
    stages=((CONTEXT, ROWS, 0),),
    phases=stages.PhasesConfig(
      tokens=tokens,
      warmup_tokens=tokens // 20,
      decay_tokens=tokens // 2,
      final_fraction=0.1,
      decay_mtp_weight=0.3,
    ),
    held_out_batches=20,
    loop=LoopConfig(steps=steps, checkpoint_every=steps),
    step=STEP,
    optimizer=OptimizerConfig('muon', learning_rate=0.02, adam_learning_rate=3e-3),
  )


def read(files: int):
  """Training and held-out token arrays."""
  exclude = ('test', 'tests', 'site-packages', 'dist-packages')
  domain = corpus.DomainConfig(sysconfig.get_path('stdlib'), ('.py',), exclude)
  found, held_out = corpus.load({'python': domain}, 0.1)
  train = documents.Subset(found.source, range(min(files, len(found.source))))
  texts = [train[i].text for i in range(0, len(train), 5)]
  tok = tokenizer.train(texts, VOCABULARY)

  def encode(text):
    return [tok.bos_id, *tok.encode(text, special=False), tok.eos_id]

  return documents.Encoded(train, encode), documents.Encoded(held_out, encode)


def held_out_batches(held_out, number: int) -> list[forest.Forest]:
  """The same for every measurement."""
  rows = packing.DocumentRows(held_out, row_tokens=CONTEXT, rows=ROWS, seed=0)
  chain = functools.partial(
    forest.chain, row_tokens=CONTEXT, rows=ROWS, row_terms=CONTEXT
  )
  return [chain(next(rows)) for _ in range(number)]


def compare(args, workdir: pathlib.Path) -> list[dict]:
  """One dict per source and moment."""
  train, held_out = read(args.files)
  batches = held_out_batches(held_out, args.held_out_batches)
  model = dataclasses.replace(model_config.tiny(), vocab_size=VOCABULARY)

  def fit(directory, steps, model, **more):
    with (
      CheckpointManager(workdir / directory) as manager,
      MetricsWriter(workdir / directory, use_tensorboard=False) as metrics,
    ):
      return pretrain.fit(
        settings(steps),
        model,
        [train],
        seed=args.seed,
        manager=manager,
        metrics=metrics,
        host={},
        files={},
        **more,
      ).variables

  start = fit('one', args.pretrain_steps, model)
  found = []

  def measure(source, part, steps, cfg, variables):
    main = pretrain.score(STEP, cfg, variables, batches)['loss']
    losses = expand_mtp.module_losses(cfg, variables, batches).tolist()
    row = {'source': source, 'part': part, 'steps': steps, 'main': main}
    found.append({**row, 'modules': losses})

  measure('-', 'one module', args.pretrain_steps, model, start)
  for source in args.sources:
    copy = jax.tree.map(jnp.copy, start)  # training takes its weights over
    cfg, variables = expand_mtp.expand(
      model, copy, MODULES, source, jax.random.key(args.seed)
    )
    measure(source, 'expanded', 0, cfg, variables)
    for part, steps in (('frozen', args.frozen_steps), ('joint', args.joint_steps)):
      frozen = part == 'frozen'
      variables = fit(
        f'{source}_{part}', steps, cfg, variables=variables, only_mtp=frozen
      )
      measure(source, part, steps, cfg, variables)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--pretrain_steps', type=int, default=600)
  parser.add_argument('--frozen_steps', type=int, default=150)
  parser.add_argument('--joint_steps', type=int, default=150)
  parser.add_argument('--held_out_batches', type=int, default=20)
  parser.add_argument('--files', type=int, default=400)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--sources', nargs='+', default=expand_mtp.SOURCES)
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  started = time.monotonic()
  with tempfile.TemporaryDirectory() as directory:
    found = compare(args, pathlib.Path(directory))
  seconds = time.monotonic() - started
  if args.json:
    print(json.dumps({**vars(args), 'seconds': seconds, 'rows': found}, indent=2))
    return
  print('| source | after | steps | main | module 1 | module 2 | module 3 |')
  print('|---|---|---|---|---|---|---|')
  for row in found:
    losses = [f'{loss:.3f}' for loss in row['modules']]
    cells = [row['source'], row['part'], str(row['steps']), f'{row["main"]:.3f}']
    print('| ' + ' | '.join(cells + losses + [''] * (MODULES - len(losses))) + ' |')
  print(f'\nseed {args.seed}; {seconds:.0f} s')


if __name__ == '__main__':
  main()
