"""A directory of training steps, each an atomic commit of arrays, ledger and files.

Law 5 of the design: the state on devices (weights, optimizer, random keys) and the
state of the host (queue head and taken ids, data position, policy version) are one
checkpoint, so that a restart cannot combine new weights with an old ledger. Orbax
writes a step under a temporary name and renames it when it is complete on disk: after a
SIGKILL at any time a step is either complete or absent.

A step's directory has `state/`, the arrays (OCDBT), and `host/` with `host.json`,
`leaves.json` (names, shapes, dtypes, checksums) and the caller's files.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Mapping
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from m2jax.checkpoint import leaves as leaves_lib
from m2jax.checkpoint.errors import (
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
  StorageError,
)
from m2jax.text import json_lines

_HOST = 'host.json'
_LEAVES = 'leaves.json'
# A part of an array is stored in chunks of at most this, so that a process of another
# mesh reads little more than its own part.
CHUNK_BYTES = 2**23
_CHECKSUM_LIMIT_BYTES = 2**28  # above it CRC-32s would block the caller for too long


# Statuses of storage that is not there now, in the texts of tensorstore's ValueErrors.
_TRANSIENT = 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'ABORTED', 'CANCELLED'


class OldStep(ValueError):
  """The step is not after the latest one."""


class Restored(NamedTuple):
  """A restored step: arrays, host dict, files by name, and its number."""

  state: Any
  host: dict[str, Any]
  files: dict[str, bytes]
  step: int


class CheckpointManager:
  """Saves and restores steps in one directory.

  Only one manager at a time may write to a directory; any number may read from it with
  `read_only`.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    keep: int | None = 2,
    keep_every_steps: int = 0,
    read_only: bool = False,
  ):
    """Opens a directory; a writer creates it and deletes what killed saves have left.

    Args:
      directory: local path, or a URL that Orbax can write (gs://…).
      keep: number of newest steps to keep; None keeps all.
      keep_every_steps: steps divisible by it are kept permanently; 0: none.
      read_only: only restores, changes nothing; safe while a job writes.
    """
    if keep is not None and keep < 1:
      raise ValueError(f'keep={keep}: must be at least 1, or None to keep all')
    text = os.fspath(directory)
    self.directory = text if '://' in text else os.path.abspath(text)
    self._orbax = None
    if read_only:
      return
    # Orbax's manager needs a single caller that a Ctrl-C cannot interrupt: otherwise it
    # loses track of threads that it has started.
    self._caller = futures.ThreadPoolExecutor(1, 'checkpoint')
    from orbax import checkpoint as ocp  # takes 0.3 s, and is only needed here

    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      keep_period=keep_every_steps or None,
      cleanup_tmp_directories=True,
    )
    make = functools.partial(ocp.CheckpointManager, self.directory, options=options)
    self._orbax = self._caller.submit(make).result()

  def steps(self) -> list[int]:
    """Committed steps on disk, ascending."""
    from etils import epath
    from orbax import checkpoint as ocp

    if not epath.Path(self.directory).is_dir():
      return []
    found = ocp.path.step.standard_name_format().find_all(self.directory)
    return sorted(metadata.step for metadata in found)

  def latest_step(self) -> int | None:
    """The newest committed step, or None."""
    return max(self.steps(), default=None)

  def save(
    self,
    step: int,
    state: Any,
    host: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
  ):
    """Starts saving a step; the caller may donate or change the state right away.

    First waits for a save in progress, and raises its error if it failed.

    Args:
      step: greater than every step in the directory.
      state: pytree of jax or numpy arrays, typed PRNG keys, or numbers.
      host: JSON-serialisable; restored as JSON does (tuples become lists).
      files: plain file name to content.

    Raises:
      OSError: the disk is full, now or at the last save; no part of a step is left.
      StorageError: the storage failed otherwise, whatever Orbax calls it.
      TypeError: a leaf of `state` or a value of `host` has an unsupported type.
      ValueError: `step` is not new, or a file's name is not plain.
    """
    if self._orbax is None:
      raise ValueError(f'{self.directory} was opened read_only: cannot save')
    from orbax import checkpoint as ocp

    from m2jax.checkpoint import files as files_lib

    table = {
      name: leaves_lib.as_array(name, leaf)
      for name, leaf in leaves_lib.table(state).items()
    }
    written = {_HOST: _encode_host(host or {})}
    for name, data in (files or {}).items():
      files_lib.check_name(name)
      if name in (_HOST, _LEAVES):
        raise ValueError(f'checkpoint file name {name!r} is reserved')
      written[name] = bytes(data)
    plain = {name: leaves_lib.storable(leaf) for name, leaf in table.items()}
    specs = _specs(table, plain)
    written[_LEAVES] = json.dumps(specs, default=vars).encode()
    how = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    args = ocp.args.Composite(
      state=ocp.args.PyTreeSave(
        leaves_lib.nest(plain), save_args=leaves_lib.nest(dict.fromkeys(plain, how))
      ),
      host=files_lib.FilesSave(written),
    )
    self._call(self._start, step, args)

  def _start(self, step: int, args):
    self._orbax.wait_until_finished()
    latest = self._orbax.latest_step()
    if latest is not None and step <= latest:
      raise OldStep(
        f'step {step} is not after the latest step {latest} in {self.directory}: '
        'to branch off an earlier step, save to another directory'
      )
    self._orbax.save(step, args=args, force=True)

  def _call(self, function, *args):
    """Calls it in Orbax's thread. An error of the storage is an OSError, while
    tensorstore and Orbax raise ValueErrors for it."""
    try:
      return self._caller.submit(function, *args).result()
    except OldStep:
      raise
    except ValueError as error:
      text = str(error)
      if os.strerror(errno.ENOSPC) in text or 'RESOURCE_EXHAUSTED' in text:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.directory)
        raise full from error
      raise StorageError(f'{self.directory}: {_reason(error)}') from error

  def wait(self):
    """Waits until the last save is committed; raises its error if it failed."""
    if self._orbax is not None:
      self._call(self._orbax.wait_until_finished)

  def close(self):
    """Waits, then stops the threads."""
    if self._orbax is not None:
      with self._caller:
        self._call(self._orbax.close)

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def restore(
    self, step: int | None = None, like: Any = None, *, partial: bool = False
  ) -> Restored:
    """Reads a step.

    Args:
      step: None is the latest.
      like: pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes,
        dtypes and, as `.sharding`, the placement: the mesh may differ from that of the
        save. numpy leaves are restored as numpy. None gives nested dicts of numpy
        arrays under the saved names.
      partial: read only the leaves of `like` (such as weights without the optimizer).

    Raises:
      MissingCheckpoint: no such directory or step.
      CheckpointMismatch: `like` does not match; names every differing leaf.
      CorruptCheckpoint: the step cannot be read, or differs from what was written.
      StorageError: the storage cannot be reached; it may be later.
    """
    step = self._find(step)
    path = self._path(step)
    host, saved, files = self._read_host(path)
    if like is None:
      like = leaves_lib.nest({name: np.empty(()) for name in saved})
    else:
      asked = {name: leaves_lib.spec(leaf) for name, leaf in _asked(like).items()}
      wrong = leaves_lib.differences(saved, asked, partial)
      if wrong:
        raise CheckpointMismatch(
          f'checkpoint {path} does not match the requested state:\n{wrong}'
        )
    table = _asked(like)
    tree = self._read(path, _state_args(table))
    read = leaves_lib.table(tree)
    restored = []
    for name, leaf in table.items():
      self._verify(path, name, read[name], saved[name])
      restored.append(leaves_lib.as_asked(read[name], leaf))
    logging.info('Restored step %d from %s', step, self.directory)
    state = jax.tree.unflatten(jax.tree.structure(like), restored)
    return Restored(state, host, files, step)

  def read_host(
    self, step: int | None = None
  ) -> tuple[dict[str, Any], dict[str, bytes], int]:
    """Reads a step's host dict and files, but not its arrays.

    Args:
      step: None is the latest.

    Returns:
      The host dict, the files by name, and the number of the step.

    Raises:
      MissingCheckpoint: no such directory or step.
      CorruptCheckpoint: they cannot be read, or differ from what was written.
    """
    step = self._find(step)
    host, _, files = self._read_host(self._path(step))
    return host, files, step

  def _read_host(self, path: str):
    """Host dict, specs of the arrays, and the caller's files.

    Unlike the arrays, of which every process reads its part, one process may read them
    alone: Orbax's reader would wait for the others.
    """
    from etils import epath

    from m2jax.checkpoint import files as files_lib

    try:
      files = files_lib.FilesHandler().restore(epath.Path(path) / 'host')
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
      raise self._corrupt(path, f'host: {_reason(e)}') from e
    try:
      host = json_lines.loads(files.pop(_HOST))
      return host, _decode_specs(files.pop(_LEAVES)), files
    except (KeyError, ValueError, TypeError, AttributeError) as e:
      raise self._corrupt(path, f'host: {e!r}') from e

  def _path(self, step: int) -> str:
    return os.path.join(self.directory, str(step))

  def _find(self, step: int | None) -> int:
    steps = self.steps()
    if step is None and steps:
      return steps[-1]
    if step in steps:
      return step
    what = 'no checkpoint' if step is None else f'no checkpoint of step {step}'
    if steps:
      raise MissingCheckpoint(f'{what} in {self.directory}: it has steps {steps}')
    from etils import epath

    path = epath.Path(self.directory)
    if not path.is_dir():
      raise MissingCheckpoint(f'{what}: {self.directory} is not a directory')
    entries = sorted(p.name for p in path.iterdir())[:10]
    raise MissingCheckpoint(
      f'{what} in {self.directory}: it contains {entries or "nothing"}'
    )

  def _read(self, path: str, args) -> Any:
    """Reads the arrays of a step; any error but those of an outage means a corrupt
    checkpoint."""
    from orbax import checkpoint as ocp

    me = jax.process_index()  # reads its part by itself, and waits for nobody
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    try:
      with ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(), multiprocessing_options=alone
      ) as reader:
        return reader.restore(path, args=ocp.args.Composite(state=args))['state']
    except Exception as e:  # Orbax, tensorstore and json raise different types
      if any(status in str(e) for status in _TRANSIENT):
        raise StorageError(f'{path}: {_reason(e)}') from e
      raise self._corrupt(path, f'state: {_reason(e)}') from e

  def _verify(self, path: str, name: str, leaf: Any, saved: leaves_lib.LeafSpec):
    if saved.crc32 is not None and leaves_lib.crc32(leaf) not in (None, saved.crc32):
      raise self._corrupt(path, f'{name}: CRC-32 differs from the one that was written')

  def _corrupt(self, path: str, reason: str) -> CorruptCheckpoint:
    others = [s for s in self.steps() if str(s) != os.path.basename(path)]
    return CorruptCheckpoint(
      f'cannot read checkpoint {path}: {reason}\n'
      f'other steps in {self.directory}: {others or "none"}'
    )


def _reason(error: BaseException) -> str:
  """The root cause in one line, without the settings that tensorstore appends."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = str(error).partition(' [tensorstore_spec=')[0].partition('\n')[0]
  return f'{type(error).__name__}: {text[:500]}'


def _encode_host(host: Mapping[str, Any]) -> bytes:
  """JSON of `host`, encoded now: the caller may change the dict during the save."""
  _check_keys('host', host)
  try:
    return json.dumps(host).encode()  # indent would disable the C encoder
  except (TypeError, ValueError) as e:
    raise TypeError(f'checkpoint `host` must be JSON-serialisable: {e}') from e


def _check_keys(where: str, value: Any):
  """Raises TypeError for int keys, which JSON would silently turn into strings."""
  items = value.items() if isinstance(value, Mapping) else enumerate(value)
  for key, item in items:
    if isinstance(value, Mapping) and not isinstance(key, str):
      raise TypeError(f'checkpoint `{where}` has the key {key!r}: must be a string')
    if isinstance(item, (Mapping, list, tuple)):
      _check_keys(f'{where}.{key}', item)


def _specs(table, plain) -> dict[str, leaves_lib.LeafSpec]:
  """Specs of the leaves by name, with CRC-32s if that is cheap."""
  checksum = sum(leaf.nbytes for leaf in plain.values()) <= _CHECKSUM_LIMIT_BYTES
  return {
    name: leaves_lib.spec(leaf, leaves_lib.crc32(plain[name]) if checksum else None)
    for name, leaf in table.items()
  }


def _decode_specs(data: bytes) -> dict[str, leaves_lib.LeafSpec]:
  return {
    name: leaves_lib.LeafSpec(tuple(s['shape']), s['dtype'], s['crc32'])
    for name, s in json_lines.loads(data).items()
  }


def _asked(like: Any) -> dict[str, Any]:
  """Leaves of `like`, numbers as 0-d numpy arrays."""
  return {
    name: leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)
    for name, leaf in leaves_lib.table(like).items()
  }


def _state_args(table: Mapping[str, Any]):
  """Orbax arguments that restore each leaf with the placement in `table`."""
  from orbax import checkpoint as ocp

  def how(leaf):
    if isinstance(leaf, (np.ndarray, np.generic)):
      return ocp.RestoreArgs(restore_type=np.ndarray)
    sharding = None if leaves_lib.is_key(leaf) else leaf.sharding
    if sharding is None:
      sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding)

  return ocp.args.PyTreeRestore(
    item=leaves_lib.nest(dict.fromkeys(table, 0)),
    restore_args=leaves_lib.nest({name: how(leaf) for name, leaf in table.items()}),
    partial_restore=True,
  )
