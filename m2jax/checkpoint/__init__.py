"""Checkpoints: weights, optimizer, ledger and data position in one atomic commit.

from m2jax.checkpoint import CheckpointManager
manager = CheckpointManager(workdir / 'checkpoints')
manager.save(step, state, host={'ledger': …}, files={'tokenizer.json': …})
state, host, files = manager.restore(like=jax.eval_shape(init))

`huggingface` reads and writes weights in the released format; `policy` loads a trained
model from a run's workdir.
"""

from m2jax.checkpoint.errors import (
  CheckpointError,
  CheckpointExists,
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
  StorageError,
)
from m2jax.checkpoint.manager import CheckpointManager, Restored

__all__ = [
  'CheckpointError',
  'CheckpointExists',
  'CheckpointManager',
  'CheckpointMismatch',
  'CorruptCheckpoint',
  'MissingCheckpoint',
  'Restored',
  'StorageError',
]
