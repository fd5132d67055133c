"""Pools from elsewhere: a named error in bounded time and memory."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct

import numpy as np
import pytest
import zstandard

from m2jax.pool import arrays, database, jsonl, tables
from m2jax.pool.data_pool import DataPool
from m2jax.pool.reader import Reader
from tests.pool.test_data_pool import completion, play, trajectory

LENGTHS = struct.Struct('<iiii')
# A zstd frame's header, with the size of its content in 8 bytes, and one without size.
BOMB = bytes.fromhex('28b52ffdc000') + (3 << 30).to_bytes(8, 'little')
STREAM = zstandard.ZstdCompressor().compressobj()
STREAM = STREAM.compress(b'x' * 99) + STREAM.flush()
DEEP = b'[' * 100_000


@pytest.mark.parametrize(
  'blob',
  [
    b'',
    b'\0',
    b'\1' + BOMB,
    b'\1' + STREAM,
    b'\1no zstd',
    b'\0' + LENGTHS.pack(-1, -1, 0, 0),
    b'\0' + LENGTHS.pack(2**31 - 1, 1, 0, 0),
    b'\0' + LENGTHS.pack(1, 0, 0, 0) + bytes(8),
    b'\4' + LENGTHS.pack(0, 0, 0, 0),
    b'\4' + LENGTHS.pack(0, 0, 0, 0) + struct.pack('<ii', -1, -1),
    b'\4' + LENGTHS.pack(1, 0, 0, 0) + bytes(4) + b'\xff\xff\xff\x7f' * 2,
  ],
  ids=lambda blob: blob[:24].hex(),
)
def test_damaged_arrays(blob):
  """Of which 96 kB could be gigabytes."""
  with pytest.raises(ValueError, match='data pool: '):
    arrays.unpack(blob, None)


def test_expert_ids_that_do_not_fit_the_parent():
  """A position outside of it, or a parent without expert ids."""
  parent = completion('s')
  shared = len(parent.tokens)
  body = LENGTHS.pack(0, 0, shared, 1) + struct.pack('<iiih', 1, 1, 77, 5)
  with pytest.raises(ValueError, match='no expert ids'):
    arrays.unpack(b'\4' + body, parent)
  parent = completion('s', experts=np.zeros((shared, 1, 1), np.int16))
  with pytest.raises(ValueError, match='positions out of range'):
    arrays.unpack(b'\4' + body, parent)


def test_what_cannot_be_read_is_not_written(monkeypatch):
  monkeypatch.setattr(arrays, 'MAX_BYTES', 1000)
  with pytest.raises(ValueError, match='more than 1000'):
    arrays.compress(0, bytes(1001))


def test_tokens_of_a_session_are_bounded(tmp_path, monkeypatch):
  """Each row may repeat all that precedes it."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    pool.add_completion(completion('s'))
    child = completion('s', 1, parent='s/0', prompt_ids=(1, 2, 3, 4, 5, 6))
    pool.add_completion(child)
    pool.flush()
    monkeypatch.setattr(tables, '_MAX_TOKENS', 12)
    with pytest.raises(ValueError, match="session 's': more than 12 tokens"):
      pool.completions('s')


@pytest.fixture(scope='module')
def used(tmp_path_factory):
  """A pool's file and its lines."""
  path = tmp_path_factory.mktemp('pool') / 'pool.db'
  with DataPool(f'sqlite:///{path}') as pool:
    play(pool, 0, group_size=1)
    pool.add_completion(completion('e'))
    pool.add_trajectory(trajectory('e', -1, messages=({'role': 'user'},)))
    pool.flush()
  opened = database.open_read_only(path)
  lines = list(jsonl.lines(opened))
  opened.close()
  return path, lines


DAMAGED = {
  'trajectories SET success = 2': 'verdict is 2',
  "trajectories SET wall_s = 'x'": "trajectory .*wall_s is 'x': must be a float",
  'trajectories SET family = 5.5': None,  # of a column of texts: '5.5'
  "trajectories SET tool_calls = 'x'": 'tool_calls',
  "trajectories SET rewards = 'x'": 'trajectory .*not JSON|trajectory .*Expecting',
  "trajectories SET rewards = '[1]'": 'trajectory ',
  f"trajectories SET messages = x'00{DEEP.hex()}'": 'trajectory .*nested more than 200',
  f"trajectories SET messages = x'00{b'[5]'.hex()}'": 'trajectory .*list of objects',
  "trajectories SET messages = 'x'": 'messages',
  "completions SET arrays = x'00'": 'completion .*arrays',
  "completions SET turn = 'x'": 'turn',
  "completions SET first_version = 'x'": 'first_version',
  "completions SET advantage = 'x'": 'advantage',
}


@pytest.mark.parametrize('change', DAMAGED, ids=lambda text: text[:50])
def test_rows_of_a_database(used, tmp_path, change):
  """SQLite stores any value in any column."""
  path = tmp_path / 'pool.db'
  shutil.copy(used[0], path)
  connection = sqlite3.connect(path)
  connection.execute(f'UPDATE {change}')
  connection.commit()
  connection.close()
  opened = database.open_read_only(path)
  reader = Reader(opened)

  def read():
    for stored in reader.newest_trajectories(9):
      session = stored.trajectory.session
      reader.turns(session), reader.completions(session)

  try:
    if DAMAGED[change] is None:
      return read()
    with pytest.raises(ValueError, match=DAMAGED[change]):
      read()
  finally:
    opened.close()


ENDLESS = 'WITH RECURSIVE x(key, value) AS (SELECT 1, 1 UNION ALL SELECT * FROM x) '


@pytest.mark.parametrize(
  'statement',
  [
    f'DROP TABLE meta; CREATE VIEW meta AS {ENDLESS} SELECT * FROM x',
    'CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM items; END',
    'CREATE VIRTUAL TABLE v USING fts5(x)',
  ],
)
def test_a_file_with_code(used, tmp_path, statement):
  """A query of a view may never end."""
  path = tmp_path / 'pool.db'
  shutil.copy(used[0], path)
  connection = sqlite3.connect(path)
  connection.executescript(statement)
  connection.close()
  for opening in (database.open_read_only, database.open_database):
    with pytest.raises(ValueError, match='views, triggers or virtual tables'):
      opening(f'sqlite:///{path}')


LINES = [
  ('pool', {'run': 5}, r'meta\.value is 5'),
  ('item', {'index': 'x'}, r'items\.index'),
  ('item', {'evil': 1}, "items has no column 'evil'"),
  ('item', {'group_size': True}, r'items\.group_size'),
  ('trajectory', {'session': 5}, r'trajectories\.session'),
  ('trajectory', {'messages': [5]}, 'messages: must be'),
  ('trajectory', {'success': 2}, 'verdict'),
  ('trajectory', {'item': 2**70}, r'trajectories\.item'),
  ('completion', {'prompt_ids': [2**40]}, 'prompt_ids: must be within'),
  ('completion', {'response_ids': [-5, 1]}, 'response_ids: must be within'),
  ('completion', {'logprobs': [9.0, -1.0]}, 'logprobs: must be within'),
  ('completion', {'logprobs': [float('nan'), -1.0]}, 'logprobs: must be'),
  ('completion', {'logprobs': [-1.0]}, 'logprobs has 1 entries'),
  ('completion', {'turn': 'x'}, r'completions\.turn'),
  ('completion', {'experts': {'shape': [9], 'base64': 'AA'}}, 'experts: '),
]


@pytest.mark.parametrize('kind, change, message', LINES, ids=[m for *_, m in LINES])
def test_lines_of_a_pool(used, tmp_path, kind, change, message):
  """The message names the line and the field."""
  lines = [json.loads(line) for line in used[1]]
  number = next(i for i, line in enumerate(lines) if line['kind'] == kind)
  lines[number] |= change
  opened, _ = database.open_database(f'sqlite:///{tmp_path}/new.db')
  try:
    with pytest.raises(ValueError, match=f'line {number + 1}: .*{message}'):
      jsonl.load(opened, map(json.dumps, lines))
  finally:
    opened.close()


def test_deep_lines(tmp_path):
  opened, _ = database.open_database(f'sqlite:///{tmp_path}/new.db')
  try:
    with pytest.raises(ValueError, match='line 1: .*nested more than'):
      jsonl.load(opened, [DEEP])
  finally:
    opened.close()
