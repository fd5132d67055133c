"""Orbax handler for small files that commit together with the arrays of a step.

The files lie in the step's directory under their own names, so that a tokenizer or a
ledger can be read by people and other tools. Their sizes and CRC-32s are in
`manifest.json` beside them. This module imports Orbax: import it late.
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

MANIFEST = 'manifest.json'


def check_name(name: str):
  """Raises ValueError unless `name` is a plain file name other than the manifest's."""
  plain = name == pathlib.PurePosixPath(name).name and name not in ('', '.', '..')
  if not plain or '\\' in name or name == MANIFEST:
    raise ValueError(f'checkpoint file name {name!r}: must be a plain file name')


class FilesHandler(ocp.AsyncCheckpointHandler):
  """Writes and reads a mapping of file name to bytes."""

  async def async_save(self, directory: epath.Path, args: FilesSave):
    """Starts writing `args.files` in the background; process 0 writes for all."""

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

  def restore(self, directory: epath.Path, args: FilesRestore) -> dict[str, bytes]:
    """All files; raises ValueError naming one that is not as it was written."""
    manifest = json.loads((directory / MANIFEST).read_text())
    files = {}
    for name, want in manifest.items():
      data = (directory / name).read_bytes()
      if len(data) != want['size_bytes']:
        raise ValueError(
          f'file {name}: {len(data)} bytes, {want["size_bytes"]} were written'
        )
      if zlib.crc32(data) != want['crc32']:
        raise ValueError(f'file {name}: its CRC-32 is not the one that was written')
      files[name] = data
    return files


@ocp.args.register_with_handler(FilesHandler, for_save=True)
@dataclasses.dataclass
class FilesSave(ocp.args.CheckpointArgs):
  """What to write: file name to bytes."""

  files: Mapping[str, bytes]


@ocp.args.register_with_handler(FilesHandler, for_restore=True)
@dataclasses.dataclass
class FilesRestore(ocp.args.CheckpointArgs):
  """Reads everything that was written."""
