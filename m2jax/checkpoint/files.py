"""Orbax handler for small files that are committed with the arrays of a step.

The files are in the step's directory under their own names, so that people and other
tools can read a tokenizer or a ledger. `manifest.json` next to them has their sizes and
CRC-32s. This module imports Orbax, which is slow: import it late.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Mapping

import jax
from etils import epath
from orbax import checkpoint as ocp
from orbax.checkpoint import future

from m2jax.text import json_lines

MANIFEST = 'manifest.json'


def check_name(name: str):
  """Raises ValueError unless `name` is a plain file name other than the manifest's."""
  plain = name == pathlib.PurePosixPath(name).name and name not in ('', '.', '..')
  if not plain or '\\' in name or name == MANIFEST:
    raise ValueError(
      f'checkpoint file name {name!r}: must be a plain file name, not {MANIFEST}'
    )


class FilesHandler(ocp.AsyncCheckpointHandler):
  """Writes and reads a mapping from file name to bytes."""

  async def async_save(self, directory: epath.Path, args: FilesSave):
    """Starts writing `args.files` in the background; only process 0 writes."""

    async def write():
      if jax.process_index() != 0:
        return
      manifest = {
        name: {'size_bytes': len(data), 'crc32': zlib.crc32(data)}
        for name, data in args.files.items()
      }
      for name, data in args.files.items():
        (directory / name).write_bytes(data)
      (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))

    return [future.CommitFutureAwaitingContractedSignals(write(), name='files_save')]

  def save(self, directory: epath.Path, args: FilesSave):
    raise NotImplementedError('files are saved through an asynchronous checkpointer')

  def restore(
    self, directory: epath.Path, args: FilesRestore | None = None
  ) -> dict[str, bytes]:
    """Returns all files.

    Raises:
      ValueError: a file differs from what was written; names it.
    """
    manifest = json_lines.loads((directory / MANIFEST).read_text())
    files = {}
    for name, want in manifest.items():
      check_name(name)
      size = (directory / name).stat().length
      if size != want['size_bytes']:
        raise ValueError(
          f'file {name}: has {size} bytes, {want["size_bytes"]} were written'
        )
      data = (directory / name).read_bytes()
      if zlib.crc32(data) != want['crc32']:
        raise ValueError(f'file {name}: CRC-32 differs from the one that was written')
      files[name] = data
    return files


@ocp.args.register_with_handler(FilesHandler, for_save=True)
@dataclasses.dataclass
class FilesSave(ocp.args.CheckpointArgs):
  """The files to write: file name to bytes."""

  files: Mapping[str, bytes]


@ocp.args.register_with_handler(FilesHandler, for_restore=True)
@dataclasses.dataclass
class FilesRestore(ocp.args.CheckpointArgs):
  """Reads all files."""
