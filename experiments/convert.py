"""Converts checkpoints, with tokenizer, to Hugging Face directories and back.

  python -m experiments.convert --checkpoint=workdir/forge --huggingface=exported
  python -m experiments.convert --from_huggingface=exported --workdir=workdir/imported

An exported directory loads in transformers' MiniMaxM2ForCausalLM. An imported one is a
workdir like any other: `--checkpoint=workdir/imported` serves, evaluates and trains it.
"""

from __future__ import annotations

import os

import jax
from absl import flags

from experiments import common
from m2jax.checkpoint import CheckpointError, CheckpointManager, huggingface, policy
from m2jax.text import tokenizer

CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'To export: a workdir or a directory of checkpoints.'
)
STEP = flags.DEFINE_integer('step', None, 'Checkpoint step; default: the latest.')
TARGET = flags.DEFINE_string(
  'huggingface', None, 'Directory to export to; new or empty.'
)
SOURCE = flags.DEFINE_string('from_huggingface', None, 'Directory to import.')
DTYPE = flags.DEFINE_enum(
  'dtype',
  None,
  ['float32', 'bfloat16', 'block_fp8'],
  'Of the weights; default: unchanged when exporting, float32 when importing. '
  'block_fp8, as released, when exporting only.',
)
SHARD_BYTES = flags.DEFINE_integer(
  'max_shard_bytes',
  huggingface.MAX_SHARD_BYTES,
  'Maximum bytes of weights in an exported file.',
)


def main():
  if bool(CHECKPOINT.value) == bool(SOURCE.value):
    raise common.BadInput('give --checkpoint to export or --from_huggingface to import')
  _export() if CHECKPOINT.value else _import()


def _export():
  if not TARGET.value:
    raise common.BadInput('--huggingface is missing: give the directory to export to')
  common.check_path('huggingface', TARGET.value)
  found = policy.load(CHECKPOINT.value, STEP.value)
  huggingface.save(
    TARGET.value,
    found.model,
    found.variables,
    tokenizer=found.tokenizer,
    dtype=DTYPE.value,
    max_shard_bytes=SHARD_BYTES.value,
  )
  print(f'step {found.step} of {found.directory} exported to {TARGET.value}')


def _import():
  if DTYPE.value == 'block_fp8':
    raise common.BadInput(
      '--dtype=block_fp8: a workdir has no blocks; serve and evaluate read them from '
      'the directory itself, with --config.engine.weights_dtype=block_fp8'
    )
  directory = common.workdir()
  if CheckpointManager(directory, read_only=True).latest_step() is not None:
    raise common.BadInput(f'{directory} has a checkpoint: give another --workdir')
  tok = tokenizer.load(SOURCE.value)
  cfg, variables = huggingface.load(SOURCE.value, dtype=DTYPE.value or 'float32')
  if tok.vocab_size > cfg.vocab_size:
    raise common.BadInput(
      f'{SOURCE.value}: the tokenizer has {tok.vocab_size} tokens, but the model only '
      f'{cfg.vocab_size}'
    )
  with open(os.path.join(SOURCE.value, huggingface.TOKENIZER), 'rb') as file:
    files = {policy.TOKENIZER_FILE: file.read()}
  with CheckpointManager(directory) as manager:
    manager.save(0, {'variables': variables}, policy.host(cfg), files)
  count = sum(leaf.size for leaf in jax.tree.leaves(variables))
  print(f'{count:,} parameters of {SOURCE.value} imported to {directory}')


if __name__ == '__main__':
  common.run(main, CheckpointError)
