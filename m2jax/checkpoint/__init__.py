"""Checkpoints: weights, optimizer, ledger and data position in one atomic commit.

from m2jax.checkpoint import CheckpointManager
manager = CheckpointManager(workdir / 'checkpoints')
manager.save(step, state, host={'ledger': …}, files={'tokenizer.json': …})
state, host, files = manager.restore(like=jax.eval_shape(init))
"""

from m2jax.checkpoint.errors import (
  CheckpointError,
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
)
from m2jax.checkpoint.manager import CheckpointManager, Restored

__all__ = [
  'CheckpointError',
  'CheckpointManager',
  'CheckpointMismatch',
  'CorruptCheckpoint',
  'MissingCheckpoint',
  'Restored',
]
