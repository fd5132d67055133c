"""Demonstrations of the scripted teacher, made by really running its commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from m2jax.tasks import terminal
from m2jax.tasks.terminal import shell, teacher


async def collect(
  specs: Sequence[str],
  config: teacher.TeacherConfig,
  *,
  concurrency: int = 16,
  on_demo: Callable[[int], None] = lambda done: None,
  **create_options: Any,
) -> list[tuple[str, teacher.Demo]]:
  """One demonstration of each task, in order.

  Args:
    specs: of the tasks.
    config: how often the teacher errs.
    concurrency: sandboxes at once.
    on_demo: called with the number done so far.
    **create_options: for `sandbox.create`.
  """
  running = asyncio.Semaphore(concurrency)
  done = 0

  async def one(spec: str):
    nonlocal done
    task = terminal.make(spec)
    async with running, shell.workspace(task, **create_options) as (execute, directory):
      demo = await teacher.demonstrate(task, execute, directory, config)
    done += 1
    on_demo(done)
    return spec, demo

  return await asyncio.gather(*map(one, specs))


def write(path: Path, demos: Sequence[tuple[str, teacher.Demo]]) -> None:
  """Writes demonstrations as JSON lines; the file appears whole or not at all."""
  new = path.with_suffix('.new')
  with open(new, 'w', encoding='utf-8') as file:
    for spec, demo in demos:
      line = {
        'task': spec,
        'success': demo.success,
        'mistakes': demo.mistakes,
        'messages': demo.messages,
      }
      file.write(json.dumps(line) + '\n')
  new.replace(path)


def read(path: Path) -> list[tuple[str, teacher.Demo]]:
  """Reads what `write` wrote."""
  demos = []
  for line in path.read_text(encoding='utf-8').splitlines():
    record = json.loads(line)
    demo = teacher.Demo(
      tuple(record['messages']), record['success'], tuple(record['mistakes'])
    )
    demos.append((record['task'], demo))
  return demos
