"""Plain pre-training on text files: next-token prediction and MTP.

python -m experiments.pretrain --config=configs/pretrain.py --workdir=workdir/pretrain
"""

from __future__ import annotations

import dataclasses
import sysconfig

from experiments import common
from m2jax.checkpoint import CheckpointError, CheckpointManager, policy
from m2jax.config import ModelConfig
from m2jax.data import text_files
from m2jax.observe.metrics import MetricsWriter
from m2jax.text import tokenizer
from m2jax.train import pretrain
from m2jax.train.workdir import OtherRun, keep_tokenizer, open_workdir


@dataclasses.dataclass(frozen=True)
class TextConfig:
  """Which files; see `data.text_files`. An empty root is this Python's own library."""

  root: str = ''
  suffixes: tuple[str, ...] = ('.py',)
  exclude_dirs: tuple[str, ...] = ()
  held_out: float = 0.05


@dataclasses.dataclass(frozen=True)
class Config:
  """One run; without a `tokenizer` file it trains one on some `tokenizer_files`."""

  seed: int
  model: ModelConfig
  text: TextConfig
  tokenizer: str
  tokenizer_files: int
  pretrain: pretrain.PretrainConfig


def main():
  config, workdir = common.build(Config, common.values()), common.workdir()
  text = config.text
  root = text.root or sysconfig.get_path('stdlib')
  paths = text_files.find(root, text.suffixes, exclude_dirs=text.exclude_dirs)
  train, held_out = text_files.split(paths, text.held_out, root=root)
  if not train or not held_out:
    raise common.BadInput(
      f'{len(train)} files to train on and {len(held_out)} held out below {root}: '
      'both need at least one; see --config.text.held_out'
    )
  open_workdir(config, workdir, common.FRESH.value)

  def make_tokenizer():
    if config.tokenizer:
      return tokenizer.load(config.tokenizer)
    some = train[:: -(-len(train) // config.tokenizer_files)]
    texts = [path.read_text('utf-8', 'replace') for path in some]
    return tokenizer.train(texts, config.model.vocab_size)

  path = workdir / policy.TOKENIZER_FILE
  tok = keep_tokenizer(path, make_tokenizer, config.model.vocab_size)

  def encode(text):
    return [tok.bos_id, *tok.encode(text, special=False), tok.eos_id]

  checkpoints = CheckpointManager(workdir / 'pretrain')
  with checkpoints as manager, MetricsWriter(workdir) as metrics:
    state = pretrain.fit(
      config.pretrain,
      config.model,
      text_files.TextFiles(train, encode),
      seed=config.seed,
      manager=manager,
      metrics=metrics,
      host={**policy.host(config.model), 'config': dataclasses.asdict(config)},
      files={policy.TOKENIZER_FILE: path.read_bytes()},
    )
    documents = text_files.TextFiles(held_out, encode)
    loss = pretrain.held_out(config.pretrain, config.model, state.variables, documents)
    metrics.supersede('held_out', -1)
    metrics.write('held_out', int(state.step), loss)
  print(
    f'held-out loss {loss["loss"]:.3f} nats/token over {loss["tokens"]} tokens after '
    f'{int(state.step)} steps\ncheckpoint: {workdir / "pretrain"}'
  )


if __name__ == '__main__':
  common.run(main, CheckpointError, OtherRun)
