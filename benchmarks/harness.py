"""What benchmarks share: flags, results that are measured once, arms, output.

args = harness.parser(__doc__, results=True).parse_args()
kept = harness.Results(args.results)
rows = [kept.once([arm, seed], lambda: train(arm, seed)) for …]
harness.show(args, rows, table)
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags

from experiments import common
from m2jax.train.workdir import WorkdirError

_NOT_SETTINGS = ('workdir', 'results', 'seeds', 'json')


def parser(
  doc: str, *, seeds: bool = True, results: bool = False, workdir: bool = False
) -> argparse.ArgumentParser:
  """A parser with --json, and the other common flags that are asked for."""
  found = argparse.ArgumentParser(description=doc.split('\n', 1)[0])
  if workdir:
    found.add_argument('--workdir', type=pathlib.Path, required=True)
  if results:
    found.add_argument(
      '--results', type=pathlib.Path, help='runs are kept there, and not repeated'
    )
  if seeds:
    found.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
  found.add_argument('--json', action='store_true')
  return found


class Results:
  """Measurements in a file of JSON lines, {'key': …, 'value': …}: each is made once."""

  def __init__(self, path: pathlib.Path | None):
    """Reads what the file has; None keeps nothing."""
    self._path, self._found = path, {}
    if path is not None and path.exists():
      lines = map(json.loads, path.read_text().splitlines())
      self._found = {_text(line['key']): line['value'] for line in lines}

  def __contains__(self, key: Sequence[Any]) -> bool:
    return _text(key) in self._found

  def once(self, key: Sequence[Any], measure: Callable[[], Any]) -> Any:
    """The value of the key; `measure` makes it if there is none.

    Args:
      key: JSON values, with every setting that changes the value.
      measure: makes a JSON value.
    """
    name = _text(key)
    if name not in self._found:
      value = measure()
      if self._path is not None:
        with self._path.open('a') as file:
          print(json.dumps({'key': list(key), 'value': value}), file=file)
      self._found[name] = value
    return self._found[name]


def _text(key: Sequence[Any]) -> str:
  return json.dumps(list(key), sort_keys=True)


def settings(args: argparse.Namespace, but: Sequence[str] = ()) -> dict[str, Any]:
  """The flags that change a measurement, as JSON values.

  Args:
    args: all flags.
    but: flags that choose measurements, besides the common ones.
  """
  values = {k: v for k, v in vars(args).items() if k not in (*_NOT_SETTINGS, *but)}
  return json.loads(json.dumps(values, default=str))


def run(
  args: argparse.Namespace,
  arms: Sequence[str],
  measure: Callable[[str, int, argparse.Namespace], dict[str, Any]],
  table: Callable[[list[dict[str, Any]]], str],
  but: Sequence[str] = (),
) -> None:
  """Measures each arm with each seed, once for a workdir, and prints the results.

  Ctrl-C and SIGTERM end it with one line and code 130; finished measurements remain. A
  directory that cannot be used ends it with one line and code 2.

  Args:
    args: flags, of a parser with `workdir`.
    arms: names.
    measure: (arm, seed, args) → a JSON object.
    table: makes a table of all results.
    but: flags that choose arms; see `settings`.
  """
  args.workdir = args.workdir.absolute()
  args.workdir.mkdir(parents=True, exist_ok=True)
  common.quiet()
  kept, given, runs = Results(args.workdir / 'results.jsonl'), settings(args, but), []
  with common.interruptible():
    for seed in args.seeds:
      for arm in arms:
        try:
          one = functools.partial(measure, arm, seed, args)
          runs.append(kept.once([arm, seed, given], one))
        except WorkdirError as error:
          common.fail(error)
  show(args, runs, table)


def show(
  args: argparse.Namespace,
  found: Any,
  table: Callable[[Any], str],
  **more: Any,
) -> None:
  """Prints what was found: as JSON with the settings and `more`, or as a table."""
  if args.json:
    values = {'settings': settings(args), 'seeds': getattr(args, 'seeds', None)}
    print(json.dumps({**values, 'runs': found, **more}, indent=1))
  else:
    print(table(found))


def spread(values: Sequence[float], digits: int = 1) -> str:
  """Median, minimum and maximum: '12.0 [11.5, 14.0]'; '12.0' if they are equal."""
  found = statistics.median(values), min(values), max(values)
  middle, low, high = (f'{value:.{digits}f}' for value in found)
  return middle if low == high else f'{middle} [{low}, {high}]'


def markdown(
  head: Sequence[str],
  rows: Sequence[Sequence[Any]],
  groups: Mapping[str, Sequence[str]] | None = None,
) -> str:
  """A Markdown table, or several narrow ones under their captions.

  Args:
    head: names of the columns.
    rows: cells, shown as `str` does.
    groups: caption → the columns of its table. A column in no group, or `None`, is in
      every table.
  """
  if groups is None:
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines)
  grouped = {name for names in groups.values() for name in names}
  if unknown := grouped - set(head):
    raise ValueError(f'no columns {sorted(unknown)} in {list(head)}')
  tables = []
  for caption, names in groups.items():
    shown = [i for i, name in enumerate(head) if name in names or name not in grouped]
    part = [[row[i] for i in shown] for row in rows]
    tables.append(f'{caption}:\n\n{markdown([head[i] for i in shown], part)}')
  return '\n\n'.join(tables)


def main(
  own: flags.FlagValues,
  measure: Callable[[], Mapping[str, Any]],
  show: Callable[[Mapping[str, Any]], None],
) -> None:
  """Runs a benchmark whose flags are absl's; `own` has a flag `json`."""

  def one(argv):
    if len(argv) > 1:
      raise app.UsageError(f'unknown arguments: {argv[1:]}')
    found = measure()
    if own.json:
      print(json.dumps(found, indent=1))
    else:
      show(found)

  flags.FLAGS.append_flag_values(own)
  own.mark_as_parsed()  # absl parses them with the global set
  for flag in own:  # --help lists them
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], own[flag])
  app.run(one)
