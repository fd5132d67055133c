"""What can be wrong with a checkpoint, as errors a person can act on (law 9)."""

from __future__ import annotations


class CheckpointError(Exception):
  """Base of the errors of this room."""


class MissingCheckpoint(CheckpointError, FileNotFoundError):
  """No such directory or step; the message says what exists there."""


class CheckpointMismatch(CheckpointError, ValueError):
  """The saved arrays do not fit the state asked for; the message names the leaves."""


class CorruptCheckpoint(CheckpointError):
  """A committed step cannot be read back as it was written."""


class CheckpointExists(CheckpointError, FileExistsError):
  """Something is where a checkpoint was to be written; nothing was changed."""
