"""Canaries (canaries.py) that fail on the right sources, as they must.

A canary fails at its first wrong assertion. If its test started a thread before, the
thread may remain, which no run that measures time allows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from m2jax_pipelines.swe import canaries

_THREADS_LEFT = 'strict: threads left'  # an event of plugin.py


def changed_files(
  sources: Mapping[str, bytes], files: Sequence[str], number: int | None = None
) -> dict[str, bytes]:
  """Canaries of test files, by path, as grade.py makes them."""
  texts = {path: sources[path].decode(errors='replace') for path in files}
  return {
    path: text.encode() for path, text in canaries.canaries_of(texts, number).items()
  }


async def proved(
  run: Callable[[Mapping[str, bytes], Sequence[str]], Awaitable[Any]],
  sources: Mapping[str, bytes],
  files: Sequence[str],
  tests: Sequence[str],
  audited: Sequence[str],
) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
  """Runs all canaries on the right sources.

  Args:
    run: runs test files with some files of the tree replaced.
    sources: the tree.
    files: test files.
    tests: tests that pass.
    audited: audit events of the right sources.

  Returns:
    Number → the tests whose canary fails; and files with canaries that leave threads.
  """
  found, untimed = [], set()
  for number in canaries.NUMBERS:
    changed = changed_files(sources, files, number)
    if not changed:
      found.append(())
      continue
    ran = await run(changed, sorted(changed))
    failed = {t for t, r in ran.tests.items() if r['status'] == 'FAILED'}
    found.append(tuple(t for t in tests if t in failed))
    if _leaves_threads(ran, audited):
      rest = sorted(set(changed) - untimed)
      untimed.update(await _leaving(run, changed, rest, audited))
  return tuple(found), frozenset(untimed)


def _leaves_threads(ran, audited) -> bool:
  return _THREADS_LEFT in set(ran.end.get('audited', ())) - set(audited)


async def _leaving(run, changed, files, audited) -> list[str]:
  """The files whose canaries leave threads."""
  if not files or not _leaves_threads(await run(changed, files), audited):
    return []
  if len(files) == 1:
    return files
  half = len(files) // 2
  return [
    path
    for part in (files[:half], files[half:])
    for path in await _leaving(run, changed, part, audited)
  ]
