"""Stage 6, injected slowness: an efficient construct is replaced by a slow equivalent.

The report has no such transformation; it gives its class of performance tasks, for
which releases of small packages have few examples. Kinds: a cache is removed, a
container is copied before each look-up, bisection is replaced by a linear scan, a short
circuit by a list, and a result is computed twice.

An edit is a task only if no test fails and the time of some tests differs
significantly (`grade.faster`) in interleaved pairs of runs.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import AsyncIterator, Iterator, Sequence

from m2jax.pipelines.candidate import Candidate
from m2jax.pipelines.context import Context
from m2jax.pipelines.swe import drafts, environment, inject, mutate, timing
from m2jax.pipelines.swe.config import Config
from m2jax.pipelines.swe.environment import Environment
from m2jax.pipelines.swe.mutate import Mutation
from m2jax.tasks.harbor import compose

_STAGE = 'slowness injection'
_MOST = 1.5  # a screened test must take this many times longer …
_LEAST_S = 0.003  # … and at least this
_CACHES = ('cache', 'lru_cache', 'cached_property')
_SCANS = {
  'bisect_left': 'sum(1 for _ in {a} if _ < {x})',
  'bisect_right': 'sum(1 for _ in {a} if not {x} < _)',
  'bisect': 'sum(1 for _ in {a} if not {x} < _)',
}


def mutations(path: str, text: str) -> list[Mutation]:
  """All slow equivalents of a file's functions; `mutate.parses` holds for each."""
  if '\r' in text or not mutate.parses(text):
    return []
  found = []
  for function, name in mutate.functions(ast.parse(text), ''):
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    for (start, end), kind, new, line in _edits(function, text):
      found.append(Mutation(path, name, first, kind, start, end, new, line))
  return [m for m in dict.fromkeys(found) if mutate.parses(m.apply(text))]


def _edits(function, text: str) -> Iterator[tuple[tuple[int, int], str, str, int]]:
  def edit(node, kind, new):
    return mutate.span(text, node), kind, new, node.lineno

  for decorator in function.decorator_list:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = getattr(call, 'attr', getattr(call, 'id', ''))
    if name in _CACHES:
      start, end = mutate.span(text, decorator)
      new = 'property' if name == 'cached_property' else '(lambda function: function)'
      yield (start, end), 'cache removed', new, decorator.lineno
  for node in mutate.own(function):
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
      (where,) = node.comparators
      if isinstance(node.ops[0], ast.In | ast.NotIn) and _named(where):
        segment = mutate.segment(text, where)
        yield edit(where, 'copied before a look-up', f'list({segment})')
    elif isinstance(node, ast.Call) and not node.keywords:
      yield from (edit(*found) for found in _calls(node, text))
    if isinstance(node, ast.Return | ast.Assign) and isinstance(node.value, ast.Call):
      call, statement = (mutate.segment(text, n) for n in (node.value, node))
      if '\n' not in call:
        indent = ' ' * node.col_offset
        yield edit(node, 'computed twice', f'{call}\n{indent}{statement}')


def _calls(node: ast.Call, text: str):
  name = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
  given = [mutate.segment(text, a) for a in node.args]
  if name in _SCANS and len(given) == 2:
    yield node, 'linear scan', _SCANS[name].format(a=given[0], x=given[1])
  elif name in ('any', 'all') and [type(a) for a in node.args] == [ast.GeneratorExp]:
    inner = given[0]
    inner = inner[1:-1] if inner.startswith('(') else inner
    yield node, 'no short circuit', f'{name}([{inner}])'
  elif name == 'get' and given and _named(getattr(node.func, 'value', node)):
    where = mutate.segment(text, node.func.value)
    yield node.func.value, 'copied before a look-up', f'dict({where})'


def _named(node: ast.AST) -> bool:
  return isinstance(node, ast.Name | ast.Attribute)


def sites(env: Environment, seed: int) -> list[tuple[Mutation, list[str]]]:
  """Slow equivalents of functions that tests call, with those tests.

  Functions of long tests come first: small differences cannot be measured.
  """
  rng = random.Random(f'{env.source.name}/{seed}/slow')
  found = []
  for path in sorted(env.source.files):
    if not compose.is_work(path, env.code, environment.EXCLUDE):
      continue
    called = env.calls.get(path, {})
    for mutation in mutations(path, env.source.files[path].decode(errors='replace')):
      tests = [t for t in called.get(mutation.line, []) if t in env.status]
      if tests:
        found.append((mutation, tests))
  rng.shuffle(found)
  # 'computed twice' is possible nearly everywhere, the others are not.
  longest = {id(s): max(env.seconds[t] for t in s[1]) for s in found}
  return sorted(found, key=lambda s: (s[0].kind == 'computed twice', -longest[id(s)]))


def _identity(env: Environment, mutation: Mutation) -> str:
  return f'slow/{inject.identity(env, mutation)}'


async def screen(
  env: Environment, chosen: Sequence[tuple[Mutation, list[str]]], context: Context
) -> list[list[str] | str]:
  """For each edit the tests that seem to take longer, or why there are none."""
  requests = []
  for mutation, tests in chosen:
    right = env.source.files[mutation.path].decode(errors='replace')
    limit_s = 3 + 20 * sum(env.seconds[t] for t in tests)
    files = sorted({drafts.test_file(t) for t in tests})
    # In turns, so that both see the same load.
    for text in (right, mutation.apply(right)) * 2:
      requests.append(
        dict(path=mutation.path, text=text, files=files, keep=tests, limit_s=limit_s)
      )
  output = await environment.run(
    context.dataset, env.site, env.source.files, 'screen',
    roots=env.roots, mutants=requests,
  )  # fmt: skip
  found = []
  for number, (_, tests) in enumerate(chosen):
    runs = [output.mutants.get(4 * number + i) for i in range(4)]
    found.append(_screened(env, tests, runs[::2], runs[1::2]))
  return found


def _screened(env, tests, right, slow) -> list[str] | str:
  if None in (*right, *slow) or any(run['timeout'] for run in slow):
    return 'the tests do not end'
  if any(run['tests'].get(t) != env.status[t] for run in slow for t in tests):
    return 'the result changes'
  longer = []
  for test in tests:
    base = max(run['seconds'].get(test, 0.0) for run in right)
    if min(run['seconds'][test] for run in slow) > max(_LEAST_S, _MOST * base):
      longer.append(test)
  return longer or 'no test takes longer'


async def candidates(
  env: Environment, config: Config, context: Context
) -> AsyncIterator[Candidate]:
  """Performance tasks of a package, up to `config.slow`."""
  left = [
    s for s in sites(env, config.seed) if _identity(env, s[0]) not in context.done
  ][: config.slow_tried]
  size, made = max(1, config.batch // 4), set()
  for at in range(0, len(left), size):
    batch = left[at : at + size]
    for (mutation, _), found in zip(
      batch, await screen(env, batch, context), strict=True
    ):
      if len(made) >= config.slow:
        return
      if isinstance(found, list) and (mutation.path, mutation.function) in made:
        continue  # of different functions
      candidate = await _candidate(env, context, mutation, found)
      if candidate.draft is not None:
        made.add((mutation.path, mutation.function))
      yield candidate


async def _candidate(env, context, mutation: Mutation, found) -> Candidate:
  right = env.source.files[mutation.path]
  text = mutation.apply(right.decode())
  draft, reason = None, found if isinstance(found, str) else ''
  id_, facts = _identity(env, mutation), {'kind': mutation.kind}
  if not reason:
    tree = {**env.source.files, mutation.path: text.encode()}
    timed, gain = await timing.significant(env, context, tree, found)
    reason = '' if timed else 'not significantly slower'
    if timed:
      facts |= {'timed': len(timed), 'gain': round(gain, 2)}
      name = inject.name(env, 'performance', id_)
      draft = drafts.performance(
        env, name, {mutation.path: text}, timed, timing.PAIRS, timing.LEAST
      )
      details = {**draft.metadata.details, 'kinds': [mutation.kind]}
      draft = dataclasses.replace(
        draft, metadata=dataclasses.replace(draft.metadata, details=details)
      )
  diff = drafts.patch({mutation.path: right}, {mutation.path: text.encode()})
  shown = inject.marked('performance', [mutation], diff)
  return Candidate(
    id_, _STAGE, 'performance', env.source.name, draft, shown, reason, facts=facts
  )
