r"""A second verifier of Terminal-Gym's tasks, which shares no code with the first.

python -m benchmarks.second_verifier_terminal --workdir=workdir/terminal_gym --tasks=50

The first verifier compares the end state with the one that the task's generator knew
when it made the workspace. This one reads the workspace as it is, derives the end state
from it and from the values that the statement gives, by other means and in plain
Python, and judges with rules of its own. Both judge several ends of each task: nothing
done, the solution, the solution with a line lost, with a stray file, and with an input
removed. A different verdict is a disagreement; so is a solution that does not pass
here. Programs are run on inputs that are drawn here. docs/pipelines_terminal.md.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import io
import itertools
import json
import os
import random
import sys
import tarfile
import tomllib
from pathlib import Path

from m2jax import sandbox
from m2jax.observe.printable import printable
from m2jax.tasks import harbor

_LIMITS = sandbox.Limits(wall_s=60.0)
_REMOVED = object()


class Item:
  """An entry of a workspace."""

  def __init__(self, kind: str, mode: int, data: bytes, mtime: float):
    self.kind, self.mode, self.data, self.mtime = kind, mode, data, mtime

  @property
  def text(self) -> str:
    return self.data.decode()


def state(archive: bytes) -> dict[str, Item]:
  """The entries of a workspace's tar archive, without folders."""
  found = {}
  with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
    for entry in tar:
      path, mode = os.path.normpath(entry.name), entry.mode & 0o7777
      if entry.isreg():
        data = tar.extractfile(entry).read()
        found[path] = Item('file', mode, data, entry.mtime)
      elif entry.issym():
        found[path] = Item('link', 0, entry.linkname.encode(), entry.mtime)
      elif entry.isdir():
        if path != '.':
          found[f'{path}/'] = Item('folder', mode, b'', entry.mtime)
      else:
        found[path] = Item('special', mode, b'', entry.mtime)
  return found


def below(before: dict[str, Item], root: str) -> list[str]:
  return sorted(p for p in before if p.startswith(f'{root}/') and p[-1] != '/')


def table(item: Item, separator: str = ',') -> list[list[str]]:
  return [line.split(separator) for line in item.text.splitlines()]


# Of a family: the changed end, {path: text, _REMOVED, or (mode,)}, how results compare.


def find_size(b, v):
  big = [p for p in below(b, v['root']) if len(b[p].data) / 1024 > int(v['kib'])]
  names = [p for p in big if os.path.splitext(p)[1] == v['suffix']]
  return {v['out']: names}, 'set'


def find_age(b, v):
  day = datetime.datetime.fromisoformat(v['day']).replace(tzinfo=datetime.UTC)
  end = {}
  for path in below(b, v['root']):
    if b[path].mtime < day.timestamp() and path.split('.')[-1] == 'log':
      end[path] = _REMOVED
      end[f'{v["old"]}/{os.path.basename(path)}'] = b[path].text
  return end, 'text'


def links(b, v):
  gone = []
  for path in below(b, v['root']):
    if b[path].kind == 'link':
      place = os.path.join(os.path.dirname(path), b[path].text)
      if os.path.normpath(place) not in b:
        gone.append(path)
  return {**dict.fromkeys(gone, _REMOVED), v['out']: lines(gone)}, 'text'


def permissions(b, v):
  files = below(b, v['root'])
  return {p: (0o755 if b[p].data.startswith(b'#!') else 0o644,) for p in files}, 'text'


def rename(b, v):
  end = {}
  for path in below(b, v['root']):
    folder, name = os.path.split(path)
    stem, _, rest = name.partition('_')
    digits, _, ending = rest.partition('.')
    if (
      stem == v['stem'] and ending == 'JPG' and digits.isdecimal() and len(digits) == 4
    ):
      end[path] = _REMOVED
      end[f'{folder}/{v["prefix"]}-{digits}.jpg'] = b[path].text
  return end, 'text'


def dedupe(b, v):
  files = below(b, v['root'])
  gone = [
    p for i, p in enumerate(files) if any(b[q].data == b[p].data for q in files[:i])
  ]
  return {**dict.fromkeys(gone, _REMOVED), v['out']: gone}, 'set'


def columns(b, v):
  rows = [r for r in table(b[v['path']], ':') if r[6] == v['shell']]
  return {v['out']: lines(','.join((r[0], r[2], r[4])) for r in rows)}, 'text'


def counts(b, v):
  rows = [line.split() for line in b[v['path']].text.splitlines()]
  hosts = sorted(r[0] for r in rows if r[4] == v['status'])
  groups = [(len(list(g)), host) for host, g in itertools.groupby(hosts)]
  groups.sort(key=lambda pair: pair[0], reverse=True)  # stable: names stay in order
  return {v['out']: lines(f'{n} {h}' for n, h in groups[: int(v['top'])])}, 'words'


def join(b, v):
  right = dict(table(b[v['right']]))
  rows = [[*row, right[row[0]]] for row in table(b[v['left']]) if row[0] in right]
  return {v['out']: lines(','.join(r) for r in sorted(rows))}, 'text'


def log_days(b, v):
  found: list[str] = []
  for path in below(b, v['root']):
    for stamp, level, *_ in (x.split() for x in b[path].text.splitlines()):
      found += [stamp.split('T')[0]] if level == v['level'] else []
  return {v['out']: lines(f'{d},{found.count(d)}' for d in sorted(set(found)))}, 'text'


def dates(b, v):
  first, last = (datetime.date.fromisoformat(v[n]) for n in ('first', 'last'))
  total = 0
  for day, town, amount in table(b[v['path']])[1:]:
    if town == v['town'] and first <= datetime.date.fromisoformat(day) <= last:
      total += int(amount)
  return {v['out']: f'{total}\n'}, 'words'


def csv_json(b, v):
  head, *rows = table(b[v['path']])
  made = [{k: int(x) if k == 'count' else x for k, x in zip(head, r, strict=True)}
          for r in rows]  # fmt: skip
  return {v['out']: json.dumps(made)}, 'json'


def restore(b, v):
  saved = state(b[v['backup']].data)
  return {p: i.text for p, i in saved.items() if p not in b and p[-1] != '/'}, 'text'


def checksums(b, v):
  bad = []
  for line in b[v['sums']].text.splitlines():
    digest, _, path = line.partition('  ')
    if path in b and hashlib.sha256(b[path].data).hexdigest() != digest:
      bad.append(path)
  return {v['out']: bad}, 'set'


def settings(b, v):
  end = {}
  for path in below(b, v['root']):
    if os.path.splitext(path)[1] == '.conf':
      rows = [line.partition(' = ') for line in b[path].text.splitlines()]
      end[path] = lines(
        f'{k} = {v["new"]}' if k == v['key'] else k + s + x for k, s, x in rows
      )
  return end, 'text'


def differences(b, v):
  old, new = ({os.path.relpath(p, v[n]): b[p].data for p in below(b, v[n])}
              for n in ('before', 'after'))  # fmt: skip
  rows = [f'added {n}' for n in new if n not in old]
  rows += [f'removed {n}' for n in old if n not in new]
  rows += [f'changed {n}' for n in old if n in new and old[n] != new[n]]
  return {v['out']: lines(sorted(rows))}, 'text'


def lines_between(b, v):
  text = b[v['path']].text
  part = text.split(f'[{v["name"]}]\n')[1].split(f'[/{v["name"]}]\n')[0]
  kept = [line for line in part.splitlines() if 'cable' not in line.split()]
  return {v['out']: lines(kept)}, 'text'


def program_totals(rng):
  towns = [f'T{rng.randint(1, 6)}' for _ in range(30)]
  rows = [(town, rng.randint(1, 99)) for town in towns]
  text = 'date,town,amount\n' + lines(f'2024-01-01,{t},{n}' for t, n in rows)
  sums = {t: sum(n for u, n in rows if u == t) for t in sorted(set(towns))}
  return text, lines(f'{t} {n}' for t, n in sums.items())


def program_frequent(rng, top):
  said = [
    rng.choice('Tree tree RIVER river stone cloud rain'.split()) for _ in range(50)
  ]
  low = [word.lower() for word in said]
  ranked = sorted(sorted(set(low)), key=low.count, reverse=True)[:top]
  return ' '.join(said) + '\n', lines(f'{w} {low.count(w)}' for w in ranked)


DERIVED = {
  f.__name__: f
  for f in (find_size, find_age, links, permissions, rename, dedupe, columns, counts,
            join, log_days, dates, csv_json, restore, checksums, settings, differences,
            lines_between)
}  # fmt: skip
PROGRAMS = ('program_totals', 'program_frequent')


def lines(rows) -> str:
  return ''.join(f'{row}\n' for row in rows)


def equal(wanted, data: bytes, how: str) -> bool:
  """Whether a result is as derived."""
  try:
    text = data.decode()
    if how == 'set':
      return sorted(text.split('\n')) == sorted([*wanted, ''])
    if how == 'words':
      return text.split() == wanted.split()
    if how == 'json':
      return repr(json.loads(text)) == repr(json.loads(wanted))
  except ValueError:
    return False
  return text == wanted


def judged(before: dict[str, Item], after: dict[str, Item], change, how: str) -> str:
  """'' if an end state is right, else why not."""
  for path in sorted({*before, *after, *change}):
    old, new, wanted = before.get(path), after.get(path), change.get(path)
    if path.endswith('/'):
      inner = any(p.startswith(path) for p in change)
      if old is None and not inner:
        return f'{path}: a new folder'
    elif wanted is _REMOVED:
      if new is not None:
        return f'{path}: still there'
    elif new is None:
      return f'{path}: missing'
    elif isinstance(wanted, tuple):
      if (new.data, new.mode) != (old.data, *wanted):
        return f'{path}: not as asked for'
    elif wanted is not None:
      if new.kind != 'file' or new.mode > 0o777 or not equal(wanted, new.data, how):
        return f'{path}: not as asked for'
    elif old is None:
      return f'{path}: new'
    elif (old.kind, old.mode, old.data) != (new.kind, new.mode, new.data):
      return f'{path}: changed'
  return ''


async def check(path: Path, seed: int) -> list[str]:
  """Disagreements on a task."""
  task = harbor.of_directory(harbor.read(path))
  facts = tomllib.loads((path / 'task.toml').read_text())['metadata']['m2jax']
  values, family = facts['details']['values'], facts['family']
  solution = (path / 'solution' / 'solve.sh').read_text()
  async with task.open(limits=_LIMITS) as environment:
    before = state(await environment.box.snapshot())
  if family in PROGRAMS:
    change, how = {values['path']: None}, 'text'
  else:
    change, how = DERIVED[family](before, values)
  results = [p for p, w in change.items() if w is not _REMOVED]
  given = next(p for p in sorted(before) if p not in change and p[-1] != '/')
  ends = {
    'nothing': ':',
    'the solution': solution,
    'a line lost': f"{solution}sed -i '$d' '{results[-1]}'",
    'a stray file': f'{solution}touch stray',
    'an input removed': f"{solution}rm '{given}'",
  }
  wrong = []
  for name, command in ends.items():
    async with task.open(limits=_LIMITS) as environment:
      await environment.box.exec(command)
      first = (await task.judge(environment)).reward
      after = state(await environment.box.snapshot())
      if family in PROGRAMS:
        reason = await program(environment.box, before, after, values, family, seed)
      else:
        reason = judged(before, after, change, how)
    if (first == 1) != (not reason) or name == 'the solution' and reason:
      wrong.append(
        f'{name}: the first says {first:g}, the second {reason or "right"!r}'
      )
  return wrong


async def program(box, before, after, values, family: str, seed: int) -> str:
  """'' if a program is right on inputs that are drawn here, else why not."""
  path = values['path']
  change = {path: after[path].text} if path in after else {path: ''}
  if reason := judged(before, after, change, 'text'):
    return reason
  rng = random.Random(seed)
  for _ in range(3):
    more = [int(values['top'])] if family == 'program_frequent' else []
    text, wanted = globals()[family](rng, *more)
    await box.write('input-of-the-second', text.encode())
    done = await box.exec(f'bash {path} input-of-the-second')
    if done.returncode or done.stdout != wanted:
      return 'the program prints something else'
  return ''


async def sample(dataset: Path, count: int, seed: int) -> dict:
  """Checks a sample of the admitted tasks."""
  found = sorted(p for p in (dataset / 'tasks').glob('*/*') if p.name[0] != '.')
  found = [p for p in found if (p / 'task.toml').exists()]
  chosen = random.Random(seed).sample(found, min(count, len(found)))
  wrong = {}
  try:
    for number, path in enumerate(chosen, 1):
      if reasons := await check(path, seed):
        wrong[path.name] = reasons
      print(f'\r{number} of {len(chosen)}', end='', file=sys.stderr)
  finally:
    await sandbox.shutdown()
  return {'tasks': len(chosen), 'verdicts': 5 * len(chosen), 'disagreements': wrong}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', type=Path, required=True)
  parser.add_argument('--tasks', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  given = parser.parse_args()
  result = asyncio.run(sample(given.workdir.resolve(), given.tasks, given.seed))
  print(f'\n{result["tasks"]} tasks, {result["verdicts"]} pairs of verdicts')
  for name, reasons in result['disagreements'].items():
    print(printable(f'{name}: {"; ".join(reasons)}'))
  print(f'tasks with disagreements: {len(result["disagreements"])}')


if __name__ == '__main__':
  main()
