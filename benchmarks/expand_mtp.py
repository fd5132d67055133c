"""Compares ways to initialize added MTP modules by the held-out loss of each module.

  python -m benchmarks.expand_mtp            # a table; --json for the numbers
  python -m benchmarks.expand_mtp --why --joint_steps=0    # parts of a copy, apart
  python -m benchmarks.expand_mtp --joint_steps=0 --frozen_rate=0.25 --frozen_steps=240

For each seed, a small M2 with one MTP module is pre-trained on Python's standard
library. From that checkpoint, each source of `train.expand_mtp` initializes modules 2
and 3, which are trained first with the main model frozen and then jointly, on the same
batches. Losses are in nats per token of the run's tokenizer, on held-out files; module
k predicts the token k + 1 ahead. `--why` compares mixtures of what
`train.expand_mtp` copies (`MIXTURES`). Tables show medians over seeds, and how much
lower the loss of a module is than that of a random one with the same seed; the last
table has the mean over all modules, by step, on batches of the frozen part. The elapsed
time is printed; the defaults take about 10 minutes on two idle CPU cores. `--workdir`
keeps the pre-trained models, for runs that change only later settings.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from m2jax import config as model_config
from m2jax import forest
from m2jax.checkpoint import CheckpointManager
from m2jax.data import corpus, documents, packing
from m2jax.observe import metrics
from m2jax.optim import AdamConfig, ByKind, MuonConfig, OptimizerConfig
from m2jax.text import tokenizer
from m2jax.train import expand_mtp, pretrain, stages
from m2jax.train.loop import LoopConfig, Run
from m2jax.train.step import StepConfig

CONTEXT, ROWS, VOCABULARY, MODULES = 256, 4, 1024, 3
TOKENS = CONTEXT * ROWS  # per batch
STEP = StepConfig(micro_rows=ROWS)


def settings(steps: int, rate: float = 1.0) -> stages.PretrainConfig:
  """Training for `steps` steps: warm-up, constant, then decay to a tenth.

  Args:
    steps: total number of steps.
    rate: factor of the learning rates.
  """
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
    optimizer=OptimizerConfig(
      by_kind=ByKind(matrix='muon', expert='muon'),
      muon=MuonConfig(learning_rate=0.02 * rate),
      adam=AdamConfig(learning_rate=3e-3 * rate),
    ),
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
  """Held-out batches, the same for every measurement."""
  rows = packing.DocumentRows(held_out, row_tokens=CONTEXT, rows=ROWS, seed=0)
  chain = functools.partial(
    forest.chain, row_tokens=CONTEXT, rows=ROWS, row_terms=CONTEXT
  )
  return [chain(next(rows)) for _ in range(number)]


class Mixture(NamedTuple):
  """Where the parts of new modules are from: names of `train.expand_mtp`'s sources.

  Attributes:
    block: source of the block and its router bias.
    projection: 'main' passes the hidden state, and a random projection of the embedding
      at a tenth of its size; `WHOLE` at its size; `BOTH` passes both, and adds them;
      `EMBEDDING` passes the embedding, and a tenth of the hidden state.
    norms: source of the norms of hidden state and embedding.
  """

  block: str
  projection: str
  norms: str


WHOLE, BOTH = 'main, whole embedding', 'main, both passed'
EMBEDDING = 'main, embedding passed'
MIXTURES = {
  WHOLE: Mixture('main', WHOLE, 'main'),
  BOTH: Mixture('main', BOTH, 'main'),
  EMBEDDING: Mixture('main', EMBEDDING, 'main'),
  'main, random projection': Mixture('main', 'random', 'main'),
  "main, module 1's projection": Mixture('main', 'mtp', 'mtp'),
  "module 1, main's projection": Mixture('mtp', 'main', 'main'),
  "random, main's projection": Mixture('random', 'main', 'main'),
  "random, module 1's projection": Mixture('random', 'mtp', 'mtp'),
}


def expanded(source: str, model, variables, key):
  """`expand_mtp.expand` for its sources and for mixtures of them."""
  expand = functools.partial(expand_mtp.expand, model, variables, MODULES, key=key)
  if source in expand_mtp.SOURCES:
    return expand(source)
  mixture = MIXTURES[source]
  cfg, out = expand(mixture.block)
  parts = {name: expand(name)[1]['params']['mtp'] for name in expand_mtp.SOURCES}
  projections = {name: part['proj'] for name, part in parts.items()}
  _, random = jnp.split(projections['random'], 2, axis=1)
  passed, tenth = jnp.split(projections['main'], 2, axis=1)
  projections[WHOLE] = jnp.concatenate([passed, random], axis=1)
  projections[BOTH] = jnp.concatenate([passed, passed], axis=1)
  projections[EMBEDDING] = jnp.concatenate([tenth, passed], axis=1)
  have, new = model.num_mtp_modules, dict(out['params']['mtp'])
  new['proj'] = new['proj'].at[have:].set(projections[mixture.projection][have:])
  for name in ('hidden_norm', 'embed_norm'):
    new[name] = new[name].at[have:].set(parts[mixture.norms][name][have:])
  return cfg, {**out, 'params': {**out['params'], 'mtp': new}}


def compare(
  args, seed: int, data, workdir: pathlib.Path, kept: harness.Results
) -> list[dict]:
  """Trains each source not in `kept` for one seed; a row per source and part."""
  train, batches = data
  model = dataclasses.replace(model_config.tiny(), vocab_size=VOCABULARY)

  def fit(directory, steps, model, rate=1.0, **more):
    with (
      CheckpointManager(workdir / directory) as manager,
      metrics.MetricsWriter(workdir / directory, use_tensorboard=False) as writer,
    ):
      return pretrain.fit(
        settings(steps, rate),
        model,
        [train],
        Run('pretrain', manager, writer),
        seed=seed,
        **more,
      ).variables

  def measure(source, part, steps, cfg, variables):
    main = pretrain.score(STEP, cfg, variables, batches)['loss']
    losses = expand_mtp.module_losses(cfg, variables, batches).tolist()
    row = {'seed': seed, 'source': source, 'after': part, 'steps': steps, 'main': main}
    return {**row, 'modules': losses}

  @functools.cache
  def start():
    return fit(f'one_{args.pretrain_steps}', args.pretrain_steps, model)

  def follow(source):
    if not source:
      return [measure('', 'one module', args.pretrain_steps, model, start())]
    copy = jax.tree.map(jnp.copy, start())  # training donates its weights
    cfg, variables = expanded(source, model, copy, jax.random.key(seed))
    rows = [measure(source, 'expansion', 0, cfg, variables)]
    parts = (('frozen', args.frozen_steps), ('joint', args.joint_steps))
    for part, steps in [(part, steps) for part, steps in parts if steps]:
      frozen = part == 'frozen'
      rate = args.frozen_rate if frozen else 1.0
      name = f'{source}_{part}_{args.frozen_steps}_{args.frozen_rate:g}'
      variables = fit(name, steps, cfg, rate, variables=variables, only_mtp=frozen)
      rows.append(measure(source, part, steps, cfg, variables))
      if frozen:
        trained = metrics.read(workdir / name, 'pretrain')
        rows[-1]['curve'] = [(r['step'], r['mtp_loss']) for r in trained]
    return rows

  found, given = [], harness.settings(args, ['sources', 'why'])
  for source in ('', *args.sources):
    key = [seed, source, given]
    found += kept.once(key, lambda source=source: follow(source))
  return found


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
  """Median losses by source and stage, and the advantage of copying over random."""

  def losses(source, after):
    """[seeds, main and modules], seeds in order."""
    mine = [r for r in rows if (r['source'], r['after']) == (source, after)]
    mine.sort(key=lambda r: r['seed'])
    return np.array([[r['main'], *r['modules']] for r in mine])

  keys = list(dict.fromkeys((r['source'], r['after'], r['steps']) for r in rows))
  names = [f'module {k}' for k in range(1, MODULES + 1)]
  lines = ['| source | after | steps | main | ' + ' | '.join(names) + ' |']
  lines.append('|---|---|---|---|' + '---|' * MODULES)
  for source, after, steps in keys:
    cells = [f'{loss:.3f}' for loss in np.median(losses(source, after), axis=0)]
    cells += [''] * (1 + MODULES - len(cells))
    lines.append('| ' + ' | '.join([source, after, str(steps), *cells]) + ' |')
  sources = [s for s in dict.fromkeys(r['source'] for r in rows) if s]
  if 'random' in sources:
    lines += ['', '| loss below that of random weights | ' + ' | '.join(names) + ' |']
    lines.append('|---|' + '---|' * MODULES)
    for source in sources:
      afters = {r['after'] for r in rows if r['source'] == source and r['steps']}
      for after in sorted(afters) if source != 'random' else ():
        ahead = (losses('random', after) - losses(source, after))[:, 1:]
        cells = [
          f'{np.median(a):+.3f} [{a.min():+.3f}, {a.max():+.3f}]' for a in ahead.T
        ]
        lines.append('| ' + ' | '.join([f'{source}, {after}', *cells]) + ' |')
    if any(r.get('curve') for r in rows):
      lines += ['', *by_step(rows, sources)]
  return '\n'.join(lines)


def by_step(rows: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> list[str]:
  """Lines of a table: how far the modules' mean loss is below that of random weights
  with the same seed, on the batches of some steps of the frozen part."""
  curves = {(r['source'], r['seed']): dict(r['curve']) for r in rows if r.get('curve')}
  seeds = sorted({seed for _, seed in curves})
  steps = sorted(curves['random', seeds[0]])
  steps = [steps[i] for i in np.unique(np.geomspace(1, len(steps), 6).astype(int)) - 1]
  lines = ['| below random, at step | ' + ' | '.join(map(str, steps)) + ' |']
  lines.append('|---|' + '---|' * len(steps))
  for source in sources:
    if source == 'random':
      continue
    cells = []
    for step in steps:
      ahead = [curves['random', s][step] - curves[source, s][step] for s in seeds]
      cells.append(f'{np.median(ahead):+.3f} [{min(ahead):+.3f}, {max(ahead):+.3f}]')
    lines.append('| ' + ' | '.join([source, *cells]) + ' |')
  return lines


def main() -> None:
  parser = harness.parser(__doc__, results=True)
  parser.add_argument('--pretrain_steps', type=int, default=300)
  parser.add_argument('--frozen_steps', type=int, default=60)
  parser.add_argument(
    '--frozen_rate', type=float, default=1.0, help='factor of its learning rates'
  )
  parser.add_argument('--joint_steps', type=int, default=60)
  parser.add_argument('--held_out_batches', type=int, default=20)
  parser.add_argument('--files', type=int, default=400)
  parser.add_argument('--sources', nargs='+', default=expand_mtp.SOURCES)
  parser.add_argument('--why', action='store_true', help='all of MIXTURES as well')
  parser.add_argument(
    '--workdir', type=pathlib.Path, help='checkpoints are kept there, and not repeated'
  )
  args = parser.parse_args()
  if args.why:
    args.sources = list(dict.fromkeys((*args.sources, *MIXTURES)))
  found, kept = [], harness.Results(args.results)
  train, held_out = read(args.files)
  data = train, held_out_batches(held_out, args.held_out_batches)
  with tempfile.TemporaryDirectory() as temporary:
    workdir = args.workdir or pathlib.Path(temporary)
    for seed in args.seeds:
      found += compare(args, seed, data, workdir / str(seed), kept)
      print(f'seed {seed}: done', file=sys.stderr)
  harness.show(args, found, tables)


if __name__ == '__main__':
  main()
