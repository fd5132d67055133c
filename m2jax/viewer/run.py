"""A run to view: its pool, tokenizer, settings and annotations."""

from __future__ import annotations

import collections
import math
import pathlib
import threading
from typing import Any

from m2jax.observe import evaluations, findings, metrics
from m2jax.pool import database
from m2jax.pool.pages import LISTED, MORE, PageReader
from m2jax.text import json_lines, tokenizer
from m2jax.text.tokenizer import Tokenizer
from m2jax.train.workdir import in_use
from m2jax.viewer.annotations import FILE, Annotations
from m2jax.viewer.bundle import LOGPROB_UNIT, Bundles

POOLS = 'pool.db', 'evaluation.db', 'served.db'
_WRITTEN_LAST = 'report.html', 'evaluation.json'  # by experiments.forge and .evaluate
_METRICS_BYTES, _POINTS = 64 << 20, 500  # read for curves; of one curve
SCHEMA = 1


class Run:
  """Opens a run for reading, also while its job writes it.

  Attributes:
    workdir, title, reader, bundles, annotations: the run's.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    pool_url: str = '',
    tok: Tokenizer | None = None,
  ):
    """Opens it.

    Args:
      workdir: the job's workdir.
      pool_url: its pool; '' is the database in the workdir.
      tok: None: WORKDIR/tokenizer.json if it is there, else tokens have no text.

    Raises:
      ValueError: it has no pool, or one that cannot be read; says where.
    """
    self.workdir = workdir
    self.title = workdir.absolute().name
    self._database = database.open_read_only(pool_url or find_pool(workdir))
    self.reader = PageReader(self._database)
    if tok is None and (path := workdir / 'tokenizer.json').exists():
      tok = tokenizer.load(path)
    settings = _settings(workdir).get('rl') or {}
    self.bundles = Bundles(self.reader, tok, _normaliser(settings.get('learner') or {}))
    self.annotations = Annotations(workdir / FILE)
    self._lock = threading.Lock()
    self._counted, self._kinds = 0, collections.Counter()
    self._evaluated, self._stages = (0, 0), []

  def summary(self) -> dict[str, Any]:
    """What the page shows above its list; cheap, since pages ask for it again."""
    with self._lock:
      newest = self.reader.newest()
      if newest > self._counted:
        for *kind, n in self.reader.kinds(self._counted, newest):
          self._kinds[tuple(kind)] += n
        self._counted = newest
      kinds = sorted(self._kinds.items())
      stages = self._find_stages()
    return {
      'schema': SCHEMA,
      'run': self.reader.run(),
      'title': self.title,
      'status': self._status(),
      'newest': newest,
      'states': self.reader.states(),
      'waiting': self.reader.waiting(),
      'trained': self.reader.trained(),
      'stages': stages,
      'kinds': [[*kind, n] for kind, n in kinds],
      'listed': [*LISTED, *MORE],
      'flagged': self.annotations.flagged(),
      'findings': len(findings.read(self.workdir)),
      'logprob_unit': LOGPROB_UNIT,
    }

  def curves(self) -> dict[str, Any]:
    """Points of the curves of `metrics.jsonl`; each one has trajectories.

    `rl`: [step, reward, success]; `eval`: [name of the stage, success, tasks]; unknown
    values are null. Of more than 500 steps every `every`-th is there, and the last.
    `problem`: why there are none.
    """
    try:
      records = self._records()
    except metrics.MetricsError as error:
      return {'rl': [], 'eval': [], 'every': 1, 'problem': str(error)}
    steps = [r for r in records if r['phase'] == 'rl' and type(r['step']) is int]
    every = max(1, math.ceil(len(steps) / _POINTS))
    rl = [
      [r['step'], _number(r.get('reward')), _number(r.get('success'))]
      for r in sorted(steps[::-every], key=lambda r: r['step'])
    ]
    return {
      'rl': rl,
      'eval': [
        [evaluations.name(r), _number(r['successes'] / r['n']), r['n']]
        for r in _evaluations(records)[-_POINTS:]
        if _number(r.get('successes')) is not None and _number(r.get('n'))
      ],
      'every': every,
      'problem': '',
    }

  def findings(self) -> list[dict[str, Any]]:
    """What the run doctor found, with the points of its series (`observe.findings`)."""
    found = findings.read(self.workdir)
    try:
      records = self._records() if found else []
    except metrics.MetricsError:
      records = []  # the evidence has some of them
    return [findings.with_records(x, records, _POINTS).as_dict() for x in found]

  def _records(self) -> list[metrics.Record]:
    """Those of metrics.jsonl. Raises MetricsError if it is damaged or large."""
    path = self.workdir / metrics.FILE_NAME
    if path.exists() and path.stat().st_size > _METRICS_BYTES:
      raise metrics.MetricsError(
        f'{metrics.FILE_NAME} is larger than {_METRICS_BYTES >> 20} MB'
      )
    return metrics.read(self.workdir)

  def _status(self) -> str:
    """'live' while the job works, 'finished', 'stopped', or '' if that is unknown."""
    if running := in_use(self.workdir):
      return 'live'
    if any((self.workdir / name).exists() for name in _WRITTEN_LAST):
      return 'finished'
    return '' if running is None else 'stopped'

  def _find_stages(self) -> list[list[Any]]:
    """[name, first row, last row] of each evaluation, in the order of its record.

    The pool has no stage: an evaluation has the rows that ended before its record and
    after that of the one before it.
    """
    path = self.workdir / metrics.FILE_NAME
    now = path.stat().st_size if path.exists() else 0, self._counted
    if now != self._evaluated:
      self._evaluated, self._stages, last = now, [], 0
      try:
        records = metrics.read(self.workdir, 'eval')
      except metrics.MetricsError:
        records = []
      for record in _evaluations(records):
        before, found = last, self.reader.evaluated(last, record['time_s'])
        if found is not None:
          last = found
          self._stages.append([evaluations.name(record), before + 1, last])
    return self._stages

  def close(self) -> None:
    """Closes the database."""
    self._database.close()


def find_pool(workdir: pathlib.Path) -> pathlib.Path:
  """The pool in a workdir.

  Raises:
    ValueError: there is none.
  """
  for name in POOLS:
    if (workdir / name).exists():
      return workdir / name
  raise ValueError(
    f'--workdir={workdir}: no {" or ".join(POOLS)}; give the workdir of '
    'experiments.forge, experiments.evaluate or experiments.serve'
  )


def _normaliser(learner: dict[str, Any]) -> str:
  # Of the file alone: a kind may be a module, which a stranger's run would name.
  return learner.get('estimator', {}).get('normaliser') or 'prompt'


def _evaluations(records: list[metrics.Record]) -> list[metrics.Record]:
  alike = (r for r in records if r['phase'] == 'eval' and r.get('family') == 'all')
  return [r for r in alike if _named(r)]


def _named(record: metrics.Record) -> bool:
  numbers = record['step'], record.get('time_s'), record.get('temperature', 1)
  return all(isinstance(x, (int, float)) for x in numbers)


def _number(value: Any) -> float | None:
  """A finite number, which is all that JSON has."""
  known = isinstance(value, (int, float)) and math.isfinite(value)
  return float(value) if known else None


def _settings(workdir: pathlib.Path) -> dict[str, Any]:
  try:
    found = json_lines.loads((workdir / 'config.json').read_text())
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}
