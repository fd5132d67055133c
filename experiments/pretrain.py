"""Pre-training on text: stages of growing context, a constant and a decay phase, MTP.

python -m experiments.pretrain --config=configs/pretrain.py --workdir=workdir/pretrain
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import common
from m2jax.checkpoint import CheckpointError, CheckpointManager, initial, policy
from m2jax.config import ModelConfig
from m2jax.data import corpus as corpus_lib
from m2jax.data import documents, quality
from m2jax.data.corpus import Corpus, DomainConfig
from m2jax.data.documents import Document
from m2jax.data.mixture import MixtureConfig
from m2jax.observe.metrics import MetricsWriter
from m2jax.optim import gnmr
from m2jax.sharding import MeshConfig, Sharding
from m2jax.text import tokenizer
from m2jax.train import pretrain
from m2jax.train.loop import Run
from m2jax.train.stages import PretrainConfig, Stage
from m2jax.train.workdir import WorkdirError, keep_tokenizer, open_workdir

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class TextConfig:
  """The text to train on; see `data.corpus`.

  Attributes:
    root, suffixes, exclude_dirs: the only domain; an empty root is this Python's own
      library.
    domains: name → fields of a `DomainConfig`; if given, the three above are not used.
    held_out: share of the documents.
    quality: scorer of documents: path of a `quality.Classifier`, or module:function;
      with '' all have the same score.
    mixture: frequencies of documents, with several domains or scores.
    join_from_context: stages of at least this context read documents joined to about
      its length; 0 is never.
  """

  root: str = ''
  suffixes: tuple[str, ...] = ('.py',)
  exclude_dirs: tuple[str, ...] = ()
  domains: dict[str, Any] = dataclasses.field(default_factory=dict)
  held_out: float = 0.05
  quality: str = ''
  mixture: MixtureConfig = MixtureConfig()
  join_from_context: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
  """One run; without a `tokenizer` file it trains one on `tokenizer_files` documents.

  `init_from`: weights to start from, with their tokenizer; they must be of `model`. A
  run may resume on another mesh, with other passes.
  """

  seed: int
  model: ModelConfig
  text: TextConfig
  tokenizer: str
  tokenizer_files: int
  pretrain: PretrainConfig
  mesh: MeshConfig = MeshConfig()
  init_from: str = ''

  def __post_init__(self):
    gnmr.check(self.pretrain.optimizer.gnmr, self.model)


def open_text(text: TextConfig) -> tuple[Corpus, Sequence[Document]]:
  """Training corpus and held-out documents."""
  domains = {
    name: common.build(DomainConfig, values, f'config.text.domains.{name}')
    for name, values in text.domains.items()
  }
  if not domains:
    root = text.root or sysconfig.get_path('stdlib')
    domains['text'] = DomainConfig(root, text.suffixes, text.exclude_dirs, join='code')
  return corpus_lib.load(domains, text.held_out)


def encoder(tok: tokenizer.Tokenizer) -> Encode:
  """Text to ids, between the tokens that begin and end a document."""
  return lambda text: [tok.bos_id, *tok.encode(text, special=False), tok.eos_id]


def stage_sources(
  text: TextConfig,
  stages: Sequence[Stage],
  corpus: Corpus,
  encode: Encode,
  *,
  seed: int,
  workdir: pathlib.Path,
) -> list[Sequence[np.ndarray]]:
  """The source of each stage: the same object for equal sources."""

  @functools.cache
  def table():
    scorer, print_ = quality.load(text.quality) if text.quality else (None, '')
    return corpus_lib.survey(corpus, scorer, workdir / 'survey.npz', print_)

  @functools.cache
  def source(join_tokens: int):
    found, rows = corpus, None
    if join_tokens:
      most = int(join_tokens * bytes_per_token(corpus.source, encode))
      found, rows = corpus_lib.joined(corpus, table(), most)
    if len(found.configs) == 1 and not text.quality:
      return documents.Encoded(found.source, encode)
    rows = table() if rows is None else rows
    return documents.Encoded(corpus_lib.mixed(found, rows, text.mixture, seed), encode)

  start = text.join_from_context
  return [source(s.context if 0 < start <= s.context else 0) for s in stages]


def bytes_per_token(source: Sequence[Document], encode: Encode) -> float:
  """Mean over a sample of documents, evenly spaced in the source."""
  some = [source[i].text for i in range(0, len(source), -(-len(source) // 50))]
  return sum(len(t.encode()) for t in some) / sum(len(encode(t)) for t in some)


def make_tokenizer(config: Config, source: Sequence[Document]) -> tokenizer.Tokenizer:
  """That of the weights to start from, the file's, or one trained on documents evenly
  spaced in the source."""
  if config.init_from:
    return initial.tokenizer(config.init_from)
  if config.tokenizer:
    return tokenizer.load(config.tokenizer)
  step = -(-len(source) // config.tokenizer_files)
  texts = [source[i].text for i in range(0, len(source), step)]
  return tokenizer.train(texts, config.model.vocab_size)


def given_weights(config: Config, sharding: Sharding) -> dict[str, Any] | None:
  """The variables that a new run starts from; None if they are random."""
  if not config.init_from:
    return None
  found = initial.load(config.init_from, config.model, sharding)
  initial.check(found.model, config.model, config.init_from)
  return found.variables


def main():
  config, workdir = common.build(Config, common.values()), common.workdir()
  common.start(config.mesh)
  process = common.join_processes()
  sharding = common.make_sharding(config.mesh)
  settings = dataclasses.replace(  # the same on any mesh
    config, mesh=MeshConfig(), pretrain=config.pretrain.on_any_mesh()
  )
  path, own = workdir / policy.TOKENIZER_FILE, workdir / 'pretrain'
  corpus, held_out = open_text(config.text)
  variables = None if common.resumes(own) else given_weights(config, sharding)
  with common.leader_first() as leads:
    open_workdir(settings, workdir, common.FRESH.value, leads)
    make = functools.partial(make_tokenizer, config, corpus.source)
    encode = encoder(keep_tokenizer(path, make, config.model.vocab_size))
    place = dict(seed=config.seed, workdir=workdir)
    stages = config.pretrain.stages
    sources = stage_sources(config.text, stages, corpus, encode, **place)

  every = config.pretrain.loop.keep_every_steps
  checkpoints = CheckpointManager(own, keep_every_steps=every)
  records = workdir if leads else workdir / f'process{process}'
  loops = {'pretrain': config.pretrain.loop}
  with (
    checkpoints as manager,
    MetricsWriter(records) as metrics,
    common.view('pretrain', loops, metrics, leads, held_out=True) as measures,
  ):
    run = Run(
      'pretrain',
      manager,
      metrics,
      host={'config': dataclasses.asdict(config)},
      files={policy.TOKENIZER_FILE: path.read_bytes()},
    )
    state = pretrain.fit(
      config.pretrain,
      config.model,
      sources,
      run,
      seed=config.seed,
      variables=variables,
      sharding=sharding,
    )
    measures()
    loss = pretrain.held_out(
      config.pretrain,
      config.model,
      state.variables,
      documents.Encoded(held_out, encode),
      sharding,
      step=int(state.step),
    )
    metrics.supersede('held_out', -1)
    metrics.write('held_out', int(state.step), loss)
  print(
    f'held-out loss {loss["loss"]:.3f} nats/token over {loss["tokens"]} tokens after '
    f'{int(state.step)} steps\ncheckpoint: {own}'
  )


if __name__ == '__main__':
  common.run(main, CheckpointError, WorkdirError, distributed=True)
