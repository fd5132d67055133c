"""The leak search finds every planted copy of test rows, and nothing elsewhere."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from m2jax_pipelines import discovery, ml
from m2jax_pipelines.ml import leaks

pytestmark = pytest.mark.skipif(
  bool(discovery.unavailable('ml')), reason='pip install -e "./m2jax_pipelines[ml]"'
)
ROWS = np.round(np.random.default_rng(0).normal(10, 5, (50, 9)), 3)
WHOLE = np.random.default_rng(1).integers(0, 17, (50, 64))
LABELS = np.random.default_rng(2).integers(0, 2, 80)
WORDS = [f'lang{i % 7}' for i in range(40)]
NEEDLES = [
  *[('row', row) for row in ROWS[::20].tolist()],
  *[('whole', row[:24]) for row in WHOLE[::20].tolist()],
  ('labels', LABELS.tolist()),
  ('words', ' '.join(WORDS)),
]


def _text(rows, form='%.3f', separator=',') -> bytes:
  return '\n'.join(separator.join(form % v for v in row) for row in rows).encode()


def _npz(**arrays) -> bytes:
  file = io.BytesIO()
  np.savez_compressed(file, **arrays)
  return file.getvalue()


def _zip(name, data) -> bytes:
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr(name, data)
  return file.getvalue()


def _sqlite(path) -> None:
  with sqlite3.connect(path) as database:
    columns = ', '.join(f'x{i} REAL' for i in range(9))
    database.execute(f'CREATE TABLE t ({columns})')
    database.executemany(f'INSERT INTO t VALUES ({"?, " * 8}?)', ROWS.tolist())
  database.close()


def _png() -> bytes:
  from PIL import Image

  file = io.BytesIO()
  Image.fromarray(WHOLE.astype(np.uint8)).save(file, 'png')
  return file.getvalue()


_CSV = b'%s\n' + _text(ROWS)
# Name → (content, the needle that must be found).
PLANTED = {
  'a.csv': (_CSV, 'row'),
  'spaces.txt': (_text(ROWS, '%.18e', ' '), 'row'),
  'records.json': (
    json.dumps([{f'x{i}': v for i, v in enumerate(r)} for r in ROWS]).encode(),
    'row',
  ),
  'a.csv.gz': (gzip.compress(_CSV), 'row'),
  'a.bz2': (bz2.compress(_CSV), 'row'),
  'a.xz': (lzma.compress(_CSV), 'row'),
  'a.whl': (_zip('p/data/a.csv.gz', gzip.compress(_CSV)), 'row'),
  'a.npz': (_npz(x=ROWS), 'row'),
  'single.npz': (_npz(x=ROWS.astype(np.float32)), 'row'),
  'array.pkl': (pickle.dumps(ROWS), 'row'),
  'list.pkl': (pickle.dumps(ROWS.tolist()), 'row'),
  'digits.npz': (_npz(x=WHOLE.astype(np.uint8)), 'whole'),
  'digits.json': (json.dumps(WHOLE.tolist()).encode(), 'whole'),
  'digits.png': (_png, 'whole'),
  'labels.txt': (_text(LABELS[:, None], '%d'), 'labels'),
  'labels.pkl': (pickle.dumps(LABELS.astype(np.int8)), 'labels'),
  'words.json': (json.dumps(WORDS).encode(), 'words'),
  'words.npz': (_npz(y=np.array(WORDS)), 'words'),
}


def searched(root, tmp_path) -> dict:
  needles = tmp_path / 'needles.json'
  needles.write_text(json.dumps({'needles': NEEDLES, 'allowed': []}))
  words = [sys.executable, leaks.__file__, str(needles), str(root)]
  return json.loads(subprocess.run(words, check=True, capture_output=True).stdout)


def test_every_planted_copy_is_found(tmp_path):
  root = tmp_path / 'root'
  root.mkdir()
  for name, (content, _) in PLANTED.items():
    (root / name).write_bytes(content() if callable(content) else content)
  _sqlite(root / 'a.sqlite')
  (root / 'a.parquet').write_bytes(b'PAR1' + bytes(20))
  (root / 'broken.gz').write_bytes(gzip.compress(_CSV)[:40])
  found = searched(root, tmp_path)
  hits = {
    (path.removeprefix(f'{root}/').partition('!')[0], name)
    for name, path in found['hits']
  }
  wanted = {(name, needle) for name, (_, needle) in PLANTED.items()}
  assert hits == wanted | {('a.sqlite', 'row')}
  assert [path.rpartition('/')[2] for path in found['unopened']] == ['a.parquet']


def test_a_row_across_two_chunks_is_found(tmp_path, monkeypatch):
  monkeypatch.setattr(leaks, '_CHUNK', 1000)
  monkeypatch.setattr(leaks, '_OVERLAP', 400)
  for shift in range(0, 1000, 90):
    search = leaks.Search(NEEDLES)
    data = b'7 ' * (shift // 2) + b'\n' + _text(ROWS[:1]) + b'\n'
    search.stream(io.BytesIO(data), 'x', 0)
    assert {name for name, _ in search.hits} == {'row'}, shift


def test_other_data_is_not_taken_for_a_leak(tmp_path):
  """Rows that differ in one value, and labels in another order."""
  root = tmp_path / 'root'
  root.mkdir()
  other = ROWS.copy()
  other[:, 4] += 0.5
  (root / 'a.csv').write_bytes(_text(other))
  np.save(root / 'a.npy', other)
  (root / 'labels').write_bytes(_text(LABELS[::-1, None], '%d'))
  found = searched(root, tmp_path)
  assert found['hits'] == [] and found['files'] == 3


@pytest.mark.thorough
def test_no_file_that_an_agent_can_read_has_test_rows(tmp_path):
  """The whole search for all problems, and with a planted copy of the labels."""
  from m2jax import sandbox
  from m2jax_pipelines import installed

  config = ml.Config()
  made = {name: ml.drawn(config, name, 'salt') for name in ml.PROBLEMS}
  assert all(len(ml.needles(name, data)) >= 3 for name, data in made.items())
  installed.site(tmp_path / 'sites', ml.SITE, ml._PACKAGES)
  planted = {'.cache/x.json': json.dumps(ml.ladder.truth(made['digits'])).encode()}

  async def both():
    try:
      inside = ml.Config(search=())
      return (
        await ml.search(config, tmp_path, made),
        await ml.search(inside, tmp_path, made, planted),
      )
    finally:
      await sandbox.shutdown()

  clean, dirty = asyncio.run(both())
  assert clean['hits'] == [] and clean['files'] > 10_000
  assert {path for _, path in dirty['hits']} == {'/workspace/.cache/x.json'}


@pytest.mark.long
def test_the_data_of_every_problem_is_found_in_its_package(tmp_path):
  """The search would find a package that a sandbox shows."""
  for name, problem in ml.PROBLEMS.items():
    data = ml.drawn(ml.Config(), name, 'salt')
    search = leaks.Search(ml.needles(name, data))
    for path in problem.paths():
      search.file(str(path))
    assert f'{name}: a public copy' in {what for what, _ in search.hits}, name
