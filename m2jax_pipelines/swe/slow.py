"""Performance tasks: code that gives the same results, in more time.

Tests of a package are quick, since their inputs are small. `with_workloads` adds tests
of its functions with large arguments (`large_calls`), whose results are known by their
digest. The agent sees them with one size of arguments, and is judged with another. An
edit of `edits` copies or scans a container where the source does not; it is a task if
all tests have the same results and some workloads take significantly longer (`timing`).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.tasks.harbor import compose, verifier
from m2jax_pipelines.candidate import Candidate
from m2jax_pipelines.context import Context
from m2jax_pipelines.make import LIMITS
from m2jax_pipelines.swe import drafts, environment, inject, large_calls, mutate, timing
from m2jax_pipelines.swe.config import Config
from m2jax_pipelines.swe.environment import Environment
from m2jax_pipelines.swe.mutate import Mutation, segment

_SIZES = 2000, 2311  # of the large arguments: as shown, and as judged
_MOST_S = 0.05  # of one call
_ALL_S = 4.0  # of all workloads of a package
_CALLS = 2  # workloads of a function, at most
_SCREENED = 4  # workloads of an edit at the first look
_LIMIT_S = 240.0
_SLOWER, _SLOWER_S = 1.5, 0.02  # at the first look, in ratio and seconds


# Workloads ----------------------------------------------------------------------------


async def with_workloads(
  env: Environment, context: Context
) -> tuple[Environment, bytes] | None:
  """The package with a file of tests with large arguments; None without any.

  Returns:
    The environment with the tests that judge; its `calls` are those of these tests
    alone. And the file as the agent sees it.
  """
  found = await _calls(env, context)
  if not found:
    return None
  path = workloads_path(env)
  shown, judged = (workloads(found, which).encode() for which in range(2))
  files = {**env.source.files, path: judged}
  called, timed = [
    await environment.run(
      context.dataset, env.site, files, mode, roots=env.roots, files=[path]
    )
    for mode in ('profile', 'run')
  ]
  if any(not ran.end or ran.end['tampered'] for ran in (called, timed)):
    return None
  passed = {
    test: record['s']
    for test, record in timed.tests.items()
    if {record['status'], called.tests.get(test, {}).get('status')} == {'PASSED'}
  }
  if not passed:
    return None
  calls = {
    file: {int(line): [t for t in tests if t in passed] for line, tests in at.items()}
    for file, at in called.end.get('calls', {}).items()
  }
  added = dataclasses.replace(
    env,
    source=dataclasses.replace(env.source, files=files),
    files=(*env.files, path),
    status={**env.status, **dict.fromkeys(passed, 'PASSED')},
    seconds={**env.seconds, **passed},
    calls=calls,
    audited=tuple(sorted({*env.audited, *environment.audited(called, timed)})),
  )
  return added, shown


def workloads_path(env: Environment) -> str:
  directory, slash, _ = env.files[0].rpartition('/')
  return f'{directory}{slash}test_workloads.py'


def workloads(calls: Sequence[dict[str, Any]], which: int) -> str:
  """The file of tests, one for each call, with arguments of one of the sizes."""
  modules = sorted({call['module'] for call in calls})
  parts = ['"""Calls with large arguments; results are known by their digest."""']
  parts += ['import hashlib', *(f'import {name}' for name in modules)]
  text = '\n'.join(parts) + '\n'
  for maker in large_calls.SHARED:
    text += f'\n\n{inspect.getsource(maker)}'
  for call in calls:
    given = ', '.join(f'{name}({_SIZES[which]})' for name in call['arguments'])
    name = f'{call["module"]}.{call["function"]}'
    title = '_'.join([name.replace('.', '_'), *call['arguments']])
    text += f'\n\ndef test_{title}():\n'
    text += (
      f'  assert digest({name}({given})) == (\n    {call["digests"][which]!r}\n  )\n'
    )
  return text


async def _calls(env: Environment, context: Context) -> list[dict[str, Any]]:
  """Calls of the package's functions, the quickest first, within `_ALL_S`."""
  request = {
    'path': [f'tree/{root}' for root in env.roots] + [f'/sites/{env.site}'],
    'modules': sorted({_module(env, path) for path in env.source.files} - {''}),
    'sizes': _SIZES,
    'most_s': _MOST_S,
    'calls': _CALLS,
  }
  async with await sandbox.create(
    limits=LIMITS,
    host=verifier.host(context.dataset),
    contents={
      'large_calls.py': inspect.getsource(large_calls).encode(),
      'request': json.dumps(request).encode(),
      **{f'tree/{path}': data for path, data in env.source.files.items()},
    },
  ) as box:
    command = environment.command('large_calls.py')
    done = await box.exec(command, timeout_s=_LIMIT_S)
  whole = done.stdout.rpartition('\n')[0]  # a late process may be in mid-line
  found = [json.loads(line) for line in whole.splitlines()]
  chosen, total = [], 0.0
  for call in sorted(found, key=lambda c: c['s']):
    total += call['s']
    if total < _ALL_S:
      chosen.append(call)
  return sorted(chosen, key=lambda c: (c['module'], c['function'], c['arguments']))


def _module(env: Environment, path: str) -> str:
  """Name of a file's module, if it is public and of the package's code; else ''."""
  if not compose.is_work(path, env.code, environment.EXCLUDE):
    return ''
  root = f'{env.roots[0]}/' if env.roots[0] else ''
  parts = (
    path.removeprefix(root).removesuffix('.py').removesuffix('/__init__').split('/')
  )
  public = all(part.isidentifier() and part[0] != '_' for part in parts)
  return '.'.join(parts) if public else ''


# Edits --------------------------------------------------------------------------------


def edits(path: str, text: str, rng: random.Random) -> list[Mutation]:
  """Edits in loops, which copy or scan a container each time; in random order."""
  return mutate.mutations(path, text, rng, _edits)


def _edits(function, text: str) -> Iterator[tuple[ast.AST, str, str]]:
  for node in dict.fromkeys(_repeated(function)):
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
      left, right = segment(text, node.left), segment(text, node.comparators[0])
      word = 'in' if isinstance(node.ops[0], ast.In) else 'not in'
      if len(node.ops) == 1 and _named(node.comparators[0]):
        yield node, 'membership', f'{left} {word} list({right})'
    elif isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
      of = segment(text, node.args[0])
      if segment(text, node.func) == 'len' and _named(node.args[0]):
        yield node, 'length', f'sum(1 for _ in {of})'
      elif segment(text, node.func) in ('min', 'max') and _named(node.args[0]):
        at = 0 if segment(text, node.func) == 'min' else -1
        yield node, 'extremum', f'sorted({of})[{at}]'
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
      if not isinstance(node.slice, ast.Slice | ast.Tuple) and _named(node.value):
        value, at = segment(text, node.value), segment(text, node.slice)
        yield node, 'item', f'list({value})[{at}]'
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
      yield from _grown(node, text)


def _repeated(function) -> Iterator[ast.AST]:
  """Nodes of a function that are inside a loop of it."""
  for node in mutate.own(function):
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
      yield from (inner for part in node.body for inner in ast.walk(part))
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
      yield from ast.walk(node)


def _grown(node: ast.Expr, text: str) -> Iterator[tuple[ast.AST, str, str]]:
  call = node.value
  if not isinstance(call.func, ast.Attribute) or len(call.args) != 1 or call.keywords:
    return
  name, item = segment(text, call.func.value), segment(text, call.args[0])
  if not _named(call.func.value) or isinstance(call.args[0], ast.Starred):
    return
  if call.func.attr == 'append':
    yield node, 'append', f'{name}[:] = {name} + [{item}]'
  elif call.func.attr == 'add':
    yield node, 'add', f'{name}.update(set({name}) | {{{item}}})'


def _named(node: ast.AST) -> bool:
  """Whether it is a variable or an attribute, which is cheap to read again."""
  return isinstance(node, ast.Name) or (
    isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  )


# Tasks --------------------------------------------------------------------------------


async def candidates(
  env: Environment, config: Config, context: Context
) -> AsyncIterator[Candidate]:
  """Tasks to make code of one package faster; edits that make no task, as rejected."""
  made = await with_workloads(env, context)
  if made is None:
    return
  timed, shown = made
  found = [
    (mutation, sorted(tests, key=lambda t: -timed.seconds[t])[:_SCREENED])
    for mutation, tests in inject.sites(timed, config.seed, edits)
    if _id(timed, mutation) not in context.done
  ]
  for at in range(0, len(found), config.batch):
    batch = found[at : at + config.batch]
    async for mutation, text, tests, ran in inject.screened(timed, batch, context):
      reason = text if ran is None else _not_slower(timed, tests, ran)
      if reason:
        yield _rejected(timed, mutation, reason)
      else:
        yield await _candidate(timed, context, mutation, text, tests, shown)


def _not_slower(env: Environment, tests, ran) -> str:
  """Why the run of an edit makes no task; '' if it may."""
  if ran['timeout']:
    return 'the tests do not end'
  if ran['end'] is None or any(ran['tests'].get(t) != env.status[t] for t in tests):
    return 'a test has another result'
  before = sum(env.seconds[t] for t in tests)
  after = sum(ran['seconds'][t] for t in tests)
  if after < max(_SLOWER * before, before + _SLOWER_S):
    return 'not slower'
  return ''


async def _candidate(
  env, context, mutation: Mutation, text, workloads, shown: bytes
) -> Candidate:
  tree = {**env.source.files, mutation.path: text.encode()}
  status = await environment.statuses(env, context.dataset, tree)
  if any(status.get(t) != s for t, s in env.status.items()):
    return _rejected(env, mutation, 'a test has another result')
  timed, ratio = await timing.significant(env, context, tree, workloads)
  if not timed:
    return _rejected(env, mutation, 'not significantly slower')
  id_ = _id(env, mutation)
  path = workloads_path(env)
  draft = drafts.performance(
    *(env, inject.name(env, 'performance', id_), {mutation.path: text}, timed),
    *(timing.PAIRS, timing.LEAST),
    shown={path: shown},
    judged={path: env.source.files[path]},
  )
  diff = drafts.patch(
    {mutation.path: env.source.files[mutation.path]},
    {mutation.path: tree[mutation.path]},
  )
  return Candidate(
    id_,
    'slowed code',
    'performance',
    env.source.name,
    draft,
    inject.marked('performance', [mutation], diff),
    facts={'kind': mutation.kind, 'timed': len(timed), 'ratio': round(ratio, 2)},
  )


def _id(env: Environment, mutation: Mutation) -> str:
  return f'slow/{inject.identity(env, mutation)}'


def _rejected(env: Environment, mutation: Mutation, reason: str) -> Candidate:
  return Candidate(
    _id(env, mutation),
    'slowed code',
    'performance',
    env.source.name,
    reason=reason,
    facts={'kind': mutation.kind},
  )
