"""Makes tasks: candidates → near-duplicates → admission → records, resumable."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import time
from pathlib import Path

from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  TextColumn,
  TimeElapsedColumn,
  TimeRemainingColumn,
)

from m2jax import kinds, sandbox
from m2jax.observe import console
from m2jax.tasks import harbor
from m2jax_pipelines import admission, duplicates, evidence, records, report
from m2jax_pipelines.candidate import Candidate, PipelineConfig
from m2jax_pipelines.context import Context
from m2jax_pipelines.llm import LLMClient

LIMITS = sandbox.Limits(
  cpu_s=300,
  memory_bytes=1 << 30,
  output_bytes=1 << 20,
  workspace_bytes=256 << 20,
  wall_s=600.0,
)
_RECORDS = 'records.jsonl'
_MAX_INVALID = 8  # candidates in a row


@dataclasses.dataclass
class Summary:
  """What a run did: tasks in the dataset, and elapsed seconds of this run."""

  tasks: int
  added: int
  wall_s: float


async def run(config: PipelineConfig, workdir: Path, *, show: bool = True) -> Summary:
  """Makes tasks until there are `config.count`, or no candidates are left.

  Args:
    config: the pipeline's config.
    workdir: the dataset; a killed run is continued.
    show: whether to draw a progress bar.

  Raises:
    SandboxUnavailable: this machine has no such sandbox.
    SandboxError: the machine or a model failed for several candidates in a row.
  """
  workdir = workdir.resolve()
  started = time.monotonic()
  log = records.Records(workdir / _RECORDS)
  _clean(workdir, log)
  before = len(log.admitted())
  with _progress(config, before, show) as (advance, say):
    maker = _Maker(config, workdir, log, advance)
    context = Context(
      workdir,
      LLMClient(config.author, 'author', workdir / 'calls.jsonl'),
      frozenset(log.ids()),
      tuple(row for row in log.rows if row['outcome'] != records.INVALID),
      say,
    )
    try:
      if before < config.count:
        await maker.consume(context)
    finally:
      await sandbox.shutdown()
      log.close()
      report.write(workdir / 'report.html', log.rows, config, workdir)
  tasks = len(log.admitted())
  return Summary(tasks, tasks - before, time.monotonic() - started)


def _clean(workdir: Path, log: records.Records) -> None:
  """Removes what an interrupted run left: staged tasks, and tasks without a record."""
  tasks = workdir / 'tasks'
  shutil.rmtree(tasks / harbor.STAGING, ignore_errors=True)
  known = {(row['split'], row['task']) for row in log.admitted()}
  for split in harbor.SPLITS:
    (tasks / split).mkdir(parents=True, exist_ok=True)
    for path in (tasks / split).iterdir():
      if (split, path.name) not in known:
        shutil.rmtree(path)
  (tasks / harbor.STAGING).mkdir()


@contextlib.contextmanager
def _progress(config: PipelineConfig, done: int, show: bool):
  columns = (
    TextColumn('{task.description:28.28}'),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
    TextColumn('{task.fields[tried]} tried'),
  )
  with console.progress(*columns, disable=not show) as bar:
    line = bar.add_task(config.kind, total=config.count, completed=done, tried=0)
    tried = 0

    def advance(admitted: bool) -> None:
      nonlocal tried
      tried += 1
      bar.update(line, advance=int(admitted), tried=tried)

    yield advance, lambda text: bar.update(line, description=text)


class _Maker:
  """Admits candidates, `config.parallel` at a time."""

  def __init__(self, config, workdir: Path, log: records.Records, advance):
    self._config, self._workdir, self._log = config, workdir, log
    self._advance = advance
    self._near = duplicates.NearDuplicates(config.near_duplicate)
    self._evaluations = duplicates.Contamination(config.decontaminate)
    self._taken = 0  # admitted, or being tried
    self._invalid = 0  # in a row, the last ones
    for row in log.admitted():
      self._near.add(row['id'], row.get('own') or duplicates.runs(row['text']))
      self._taken += 1

  async def consume(self, context: Context) -> None:
    """Takes candidates until there are enough tasks."""
    module = kinds.module(__package__, self._config.kind)
    running: set[asyncio.Task] = set()
    stream = module.candidates(self._config, context)
    try:
      async for candidate in stream:
        if candidate.id in context.done:
          continue
        self._check()
        while self._taken >= self._config.count or (
          len(running) >= self._config.parallel
        ):
          if not running:
            return
          running = await _settle(running)
        if self._rejected_early(candidate):
          continue
        self._taken += 1
        running.add(asyncio.create_task(self._try(candidate)))
    finally:
      await stream.aclose()
      while running:
        running = await _settle(running)

  def _rejected_early(self, candidate: Candidate) -> bool:
    reason = candidate.reason
    if candidate.draft is not None:
      features = candidate.own or duplicates.runs(candidate.text)
      earlier = self._near.find(features)
      seen = self._evaluations.find(f'{candidate.draft.instruction} {candidate.text}')
      if earlier:
        reason = f'near-duplicate of {earlier}'
      elif seen:
        reason = f'repeats the evaluation record {seen}'
      else:
        # Now, so that none of two that are tried at once is missed.
        self._near.add(candidate.id, features)
        return False
    outcome = records.PASSED if candidate.passed else records.REJECTED
    if candidate.invalid:
      outcome = records.INVALID
    self._append(candidate, outcome, reason)
    return True

  def _check(self) -> None:
    """Raises SandboxError if too many candidates in a row are invalid."""
    if self._invalid >= _MAX_INVALID:
      raise sandbox.SandboxError(
        f'{self._invalid} candidates in a row are invalid, the last for: '
        f'{self._log.rows[-1]["reason"]}; once that is fixed the same command continues'
      )

  async def _try(self, candidate: Candidate) -> None:
    split = self._config.split(candidate.source)
    tasks = self._workdir / 'tasks'
    path = harbor.write(candidate.draft, tasks / harbor.STAGING)
    found = await admission.admit(
      harbor.read(path), backend=self._config.backend, limits=LIMITS
    )
    evidence.save(self._workdir, candidate.draft.name, found.evidence)
    if found.outcome == records.ADMITTED:
      os.rename(path, tasks / split / path.name)
    else:
      shutil.rmtree(path)
      self._taken -= 1
    self._append(
      candidate,
      found.outcome,
      found.reason,
      split=split,
      task=candidate.draft.name,
      text=candidate.text,
      own=list(candidate.own),
      admission_s=found.wall_s,
      verifier_s=list(found.verifier_s),
    )

  def _append(self, candidate: Candidate, outcome: str, reason: str, **more) -> None:
    self._log.append(
      id=candidate.id,
      stage=candidate.stage,
      family=candidate.family,
      source=candidate.source,
      outcome=outcome,
      reason=reason,
      wall_s=candidate.wall_s,
      **more,
      facts=dict(candidate.facts),
    )
    self._invalid = self._invalid + 1 if outcome == records.INVALID else 0
    self._advance(outcome == records.ADMITTED)


async def _settle(running: set[asyncio.Task]) -> set[asyncio.Task]:
  """Waits for one of the tasks; raises what it raised."""
  done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
  for task in done:
    task.result()
  return left
