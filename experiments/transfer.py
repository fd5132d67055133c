"""Writes a data pool to a file, or reads one into an empty database.

  python -m experiments.transfer --workdir=workdir/forge --to=pool.jsonl
  python -m experiments.transfer --workdir=workdir/forge --to=atif.jsonl --format=atif
  python -m experiments.transfer --pool=postgresql://me@host/new --from=pool.jsonl

`jsonl` is the whole pool (`pool.jsonl`): a run continues on a copy, on either database,
if its `config.roles.pool_url` is the copy's. `atif` is one ATIF document a line
(`pool.atif`), of the trajectories that have messages; read back, they belong to no work
item, and without `--trusted` they are not judged. The job logs how many replies have no
token ids, since those were pruned or cannot be determined, and how many completions are
in `extra`, since no reply shows them. The pool may be in use while it is written.
"""

from __future__ import annotations

import json
import os
import pathlib

from absl import flags, logging

from experiments import common
from m2jax.pool import atif, database, jsonl
from m2jax.pool.data_pool import DataPool
from m2jax.pool.reader import Reader
from m2jax.rl import rewards
from m2jax.text import json_lines

POOL = flags.DEFINE_string('pool', None, 'URL of the pool; default WORKDIR/pool.db.')
TO = flags.DEFINE_string('to', None, 'File to write the pool to.')
FROM = flags.DEFINE_string('from', None, 'File to read the pool from.')
TRUSTED = flags.DEFINE_bool(
  'trusted', False, 'ATIF documents are of a run of yours: their verdicts count.'
)
FORMAT = flags.DEFINE_enum('format', 'jsonl', ['jsonl', 'atif'], 'Of the file.')


def main():
  if (TO.value is None) == (FROM.value is None):
    raise common.BadInput('give one of --to=FILE and --from=FILE')
  common.check_path('to', TO.value)
  url = POOL.value or f'sqlite:///{common.workdir().absolute()}/pool.db'
  if TO.value is not None:
    opened = database.open_read_only(url)
    lines = jsonl.lines(opened) if FORMAT.value == 'jsonl' else _documents(opened)
    count = _write(pathlib.Path(TO.value), lines)
    opened.close()
    logging.info('%d lines of %s to %s', count, opened.url, TO.value)
    return
  try:
    with open(FROM.value, 'rb') as source:
      count = (_load if FORMAT.value == 'jsonl' else _add)(
        url, json_lines.lines(source)
      )
  except OSError as error:
    raise common.BadInput(f'--from={FROM.value}: {error.strerror}') from error
  logging.info('%d lines of %s to %s', count, FROM.value, database.shown_url(url))


def _write(path: pathlib.Path, lines) -> int:
  """Writes all lines or no file; returns their number."""
  new, count = path.with_name(path.name + '.new'), 0
  with open(new, 'w', encoding='utf-8') as file:
    for line in lines:
      file.write(line + '\n')
      count += 1
  os.replace(new, path)
  return count


def _documents(opened: database.Database):
  """The lines; logs what they do not show."""
  reader = Reader(opened)
  trajectories = without_ids = apart = 0
  for stored in reader.each_trajectory():
    sampled = reader.completions(stored.trajectory.session)
    acted = rewards.acted(sampled, stored.trajectory.rewards)
    used = {c.id for c in acted}
    others = [c for c in sampled if c.id not in used]
    document = atif.document(stored.trajectory, acted, stored.reward, others=others)
    trajectories += 1
    replies, more = atif.unmatched(document)
    without_ids, apart = without_ids + replies, apart + more
    yield json.dumps(document)
  if without_ids or apart:
    logging.warning(
      '%d trajectories: %d replies have no token ids, and %d completions that no reply '
      "shows are in extra['m2jax']['%s']",
      *(trajectories, without_ids, apart, atif.OTHERS),
    )


def _load(url: str, source) -> int:
  opened, _ = database.open_database(url)
  try:
    return jsonl.load(opened, (line for _, line in source))
  finally:
    opened.close()


def _add(url: str, source) -> int:
  """Adds ATIF documents to a pool, all or none."""
  documents = []
  for number, line in source:
    try:
      documents.append(atif.read(json_lines.loads(line), trusted=TRUSTED.value))
    except ValueError as error:
      raise common.BadInput(f'line {number}: {error}') from error
  with DataPool(url) as pool:
    for trajectory, completions, reward in documents:
      for completion in completions:
        pool.add_completion(completion)
      pool.add_trajectory(trajectory)
      if reward is not None:
        pool.set_rewards({trajectory.session: reward})
    pool.flush()
  return len(documents)


if __name__ == '__main__':
  common.run(main)
