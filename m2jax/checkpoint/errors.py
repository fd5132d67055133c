"""Errors of checkpoints, with messages that name the remedy (law 9)."""

from __future__ import annotations


class CheckpointError(Exception):
  """Base class of the errors of this package."""

  repeatable = False


class MissingCheckpoint(CheckpointError, FileNotFoundError):
  """No such directory or step; the message lists what exists."""


class CheckpointMismatch(CheckpointError, ValueError):
  """The saved arrays do not match the requested state; the message names the leaves."""


class CorruptCheckpoint(CheckpointError):
  """A committed step cannot be read, or differs from what was written."""


class StorageError(OSError):
  """The storage failed, and may work later: no error of the user."""

  repeatable = True


class CheckpointExists(CheckpointError, FileExistsError):
  """The target of a save already exists; nothing was changed."""
