"""Sources of documents: the same records through every format, chosen and joined."""

import concurrent.futures
import json
import os

import grain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.data import chats, documents, packing, record_files
from m2jax.data.documents import Document
from m2jax.text import json_lines

RECORDS = [
  {'text': f'text {i} é\n{"x" * i}', 'language': 'ab'[i % 2], 'stars': i}
  for i in range(7)
]


def write_jsonl(path):
  lines = [json.dumps(record, ensure_ascii=i % 2) for i, record in enumerate(RECORDS)]
  path.write_text('\n\n'.join(lines), encoding='utf-8')  # blank lines, none at the end


def write_parquet(path):
  import pyarrow
  from pyarrow import parquet

  parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=3)


def write_array_record(path):
  from array_record.python import array_record_module

  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in RECORDS:
    writer.write(json.dumps(record, ensure_ascii=False).encode())
  writer.close()


WRITERS = {
  '.jsonl': write_jsonl,
  '.parquet': write_parquet,
  '.array_record': write_array_record,
}


@pytest.fixture(params=WRITERS)
def source(request, tmp_path):
  """One file of the records, in each format."""
  path = tmp_path / f'file{request.param}'
  WRITERS[request.param](path)
  return record_files.READERS[request.param](path)


def test_every_format_gives_the_records(source):
  """Texts and fields, in random order, by an index from either end."""
  for i in (3, 0, 6, 5, 1, 2, 4):
    found = source[i]
    assert found.text == RECORDS[i]['text'] and found.name == source.name(i)
    assert dict(found.fields) == {k: v for k, v in RECORDS[i].items() if k != 'text'}
  assert len(source) == 7 and source[-1].text == RECORDS[-1]['text']
  assert len({source.name(i) for i in range(7)}) == 7
  with pytest.raises(IndexError):
    source[7]


def test_what_must_not_be_trained_is_skipped(tmp_path, caplog):
  """Calls of authors and judges have a field `text`, as documents do."""
  path = tmp_path / 'calls.jsonl'
  records = [
    {'role': 'judge', 'training': False, 'text': 'a judgement'},
    {'text': 'a document about "training"', 'training': 'a field of another meaning'},
    {'text': 'a document', 'training': True},
  ]
  path.write_text('\n'.join(map(json.dumps, records)))
  with caplog.at_level('WARNING'):
    found = record_files.JsonLines(path)
  assert [d.text for d in found] == [record['text'] for record in records[1:]]
  assert found[0].name == 'calls.jsonl:2'  # lines are counted as in the file
  assert '1 lines with training: false' in caplog.text


def test_grain_reads_our_sources(source):
  """They are random-access data sources of grain: its transformations take them."""
  dataset = grain.MapDataset.source(source).map(lambda d: len(d.text)).shuffle(seed=1)
  assert sorted(dataset) == sorted(len(record['text']) for record in RECORDS)


def test_threads_read_at_once(source):
  """grain reads ahead in threads; a Parquet file read by two at once crashed."""
  indices = list(range(7)) * 150
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    found = pool.map(lambda i: source[i].text, indices)
  assert list(found) == [RECORDS[i]['text'] for i in indices]


def test_a_longer_file_is_noticed(source, tmp_path):
  """The fingerprint, which invalidates a saved position, changes with the file."""
  suffix = source.name(0).rpartition('.')[2].partition(':')[0]
  again = tmp_path / 'again'
  again.mkdir()
  RECORDS.append({'text': 'one more', 'language': 'a', 'stars': 9})
  try:
    WRITERS[f'.{suffix}'](again / f'file.{suffix}')
  finally:
    RECORDS.pop()
  other = record_files.READERS[f'.{suffix}'](again / f'file.{suffix}')
  assert other.fingerprint != source.fingerprint


def test_bad_records_are_named(tmp_path):
  """In a file of millions the line must be found."""
  path = tmp_path / 'bad.jsonl'
  lines = ['{"text": "a"}', '{"body": "a"}', '{"text": 3}', '[1]', 'nonsense']
  lines += ['[' * 100_000, '{"training": ' + '[' * 100_000, '{"text": "ab\\udc80"}']
  path.write_text('\n'.join(lines))
  source = record_files.JsonLines(path)
  for index, match in enumerate(
    [r'bad\.jsonl:2 has no text in the field .text.; it has body']
    + [r'bad\.jsonl:3: the field .text. is of type int', r'bad\.jsonl:4 .* no fields']
    + [r'bad\.jsonl:5 is not a JSON record']
    + [r'bad\.jsonl:6 is not a JSON record: nested', r'bad\.jsonl:7 is not a JSON']
    + [r'bad\.jsonl: bad\.jsonl:8: .*not valid Unicode at character 2'],
    1,
  ):
    with pytest.raises(ValueError, match=match):
      source[index]
  assert record_files.JsonLines(path, text_field='body')[1].text == 'a'


def test_a_line_without_end_takes_no_memory(tmp_path, monkeypatch):
  """A sparse file of terabytes is one line; so is a record file without newlines."""
  path = tmp_path / 'sparse.jsonl'
  path.write_text('\n')
  os.truncate(path, 1 << 40)
  monkeypatch.setattr(json_lines, 'MAX_LINE_BYTES', 1 << 20)
  for read in (record_files.JsonLines, chats.read):
    with pytest.raises(ValueError, match=r'sparse\.jsonl, line 2: more than'):
      read(path)


def test_a_null_text_is_named(tmp_path):
  """Data sets have some: the error has the row, and no advice on other fields."""
  import pyarrow
  from pyarrow import parquet

  table = pyarrow.table({'text': ['a', None], 'data': [b'a', b'b']})
  parquet.write_table(table, tmp_path / 'a.parquet')
  (tmp_path / 'a.jsonl').write_text('{"text": "a"}\n{"text": null}\n')
  for source, name in (
    (record_files.Parquet(tmp_path / 'a.parquet'), 'a.parquet:1'),
    (record_files.JsonLines(tmp_path / 'a.jsonl'), 'a.jsonl:2'),
  ):
    assert source[0].text == 'a'
    with pytest.raises(ValueError, match=f"{name}: the field 'text' is null, not text"):
      source[1]
  source = record_files.Parquet(tmp_path / 'a.parquet', text_field='data')
  with pytest.raises(ValueError, match="the field 'data' is of type bytes"):
    source[0]


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
  """The person learns what to install."""
  monkeypatch.setitem(__import__('sys').modules, 'pyarrow', None)
  with pytest.raises(ModuleNotFoundError, match=r'pip install .m2jax\[parquet\]'):
    record_files.Parquet(tmp_path / 'a.parquet')


def texts(*found):
  return [Document(text, f'n{i}') for i, text in enumerate(found)]


@given(
  sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
  picks=st.lists(st.integers(0, 30), max_size=8),
)
def test_chains_and_subsets(sizes, picks):
  """Indexing a chain equals indexing the concatenated list; so does a subset of it."""
  lists = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(sizes)]
  flat, chain = sum(lists, []), documents.Chain(lists)
  assert list(chain) == flat == [chain[i] for i in range(len(chain))]
  picks = [p % len(flat) for p in picks] if flat else []
  assert list(documents.Subset(chain, picks)) == [flat[p] for p in picks]


def test_joined_documents_are_one_text():
  """Members in order, the first one's name; and each change of the groups is seen."""
  source = texts('a', 'b', 'c')
  joined = documents.Joined(source, [[2, 0], [1]], separator='|')
  assert [(d.text, d.name) for d in joined] == [('c|a', 'n2'), ('b', 'n1')]
  other = documents.Joined(source, [[0, 2], [1]], separator='|')
  assert joined.fingerprint != other.fingerprint
  with pytest.raises(ValueError, match='is empty'):
    documents.Joined(source, [[]])


def test_fingerprints_reach_the_saved_position():
  """Through subset, mixture and encoding: other documents reject the position."""

  class Source(list):
    fingerprint = 'one'

  def position(source, state=None):
    tokens = documents.Encoded(documents.Subset(source, [0, 1]), lambda t: [1, 2])
    return packing.DocumentRows(tokens, row_tokens=2, rows=1, state=state).state()

  source = Source(texts('a', 'b'))
  state = position(source)
  position(source, state)
  source.fingerprint = 'two'
  with pytest.raises(ValueError, match='fingerprint'):
    position(source, state)


def test_held_out_depends_on_the_name_only():
  """Documents that come later must not move a held-out one into training."""
  names = [f'{i}.py' for i in range(400)]
  held = [name for name in names if documents.held_out(name, 0.25)]
  assert 60 < len(held) < 140
  assert not any(documents.held_out(name, 0.0) for name in names)
  assert all(documents.held_out(name, 1.0) for name in names)
  more = [name for name in names if documents.held_out(name, 0.5)]
  assert set(held) < set(more)
