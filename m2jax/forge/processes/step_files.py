"""The packed batch of an RL step as files, for the processes that train it.

WORKDIR/rl_steps/STEP/
  manifest.json  what is trained: the step, its items, numbers of rows and chunks, and
                 the file of each host's rows
  rows-H.npz     the rows of host H
  tree.npz       the tree that is trained in chunks, which all hosts read

The directory appears at once, under its name, when it is complete. A restart does not
read it: the ledger decides what is trained again. It is deleted once a checkpoint of
the step or of a later one is committed.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np

from m2jax import forest
from m2jax.forest import Forest
from m2jax.rl.packing import Batch

DIRECTORY = 'rl_steps'  # in the workdir
_MANIFEST = 'manifest.json'


class StepFiles:
  """The directory of one run's steps, on storage that all processes share."""

  def __init__(self, directory: pathlib.Path):
    self._directory = directory

  def write(self, step: int, items: Sequence[int], parts: Sequence[Batch]) -> None:
    """Writes a step; `parts` are the hosts', with the same plan."""
    final = self._directory / str(step)
    new = final.with_name(f'{step}.new')
    for path in (new, final):  # of a process that was killed
      shutil.rmtree(path, ignore_errors=True)
    new.mkdir(parents=True)
    plan, rows = parts[0].plan, {}
    for host, part in enumerate(parts):
      if part.rows is not None:
        rows[host] = f'rows-{host}.npz'
        _write(new / rows[host], part.rows)
    if plan is not None:
      _write(new / 'tree.npz', plan.tree)
    manifest = {
      'step': step,
      'items': list(items),
      'rows': sum(len(p.rows.tokens) for p in parts if p.rows is not None),
      'chunks': 0 if plan is None else len(plan),
      'chunked': parts[0].chunked,
      'files': {'rows': rows, 'tree': None if plan is None else 'tree.npz'},
    }
    (new / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    new.rename(final)

  def read(self, step: int, host: int, buckets: forest.Buckets) -> Batch:
    """The part of one host; `buckets` are the learner's."""
    directory = self._directory / str(step)
    manifest = json.loads((directory / _MANIFEST).read_text())
    rows = manifest['files']['rows'].get(str(host))
    tree = manifest['files']['tree']
    return Batch(
      _read(directory / rows) if rows else None,
      forest.cut(_read(directory / tree), buckets) if tree else None,
      manifest['chunked'],
    )

  def prune(self, committed: int | None) -> None:
    """Deletes all steps up to that of a committed checkpoint; None is all steps."""
    if not self._directory.exists():
      return
    for path in self._directory.iterdir():
      if committed is None or int(path.name.partition('.')[0]) <= committed:
        shutil.rmtree(path)


def _write(path: pathlib.Path, batch: Forest) -> None:
  fields = {name: getattr(batch, name) for name in vars(batch)}
  np.savez(path, **{k: np.asarray(v) for k, v in fields.items() if v is not None})


def _read(path: pathlib.Path) -> Forest:
  with np.load(path) as fields:
    return Forest(**fields)
