"""Streams: nothing lost or doubled, order a function of the seed, exact resumption."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import grain
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from m2jax import forest
from m2jax.data import packing, stream, text_files
from m2jax.data.documents import Encoded

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum)


def documents(sizes):
  """Documents whose tokens are all different: token = 1000 · document + offset."""
  return [np.arange(n, dtype=np.int32) + 1000 * i for i, n in enumerate(sizes)]


def samples(sizes):
  return [forest.Sample(d, prompt_length=1) for d in documents(sizes) if len(d)]


def equal(a, b):
  """Whether two lists of batches hold the same arrays."""
  return len(a) == len(b) and all(
    len(x) == len(y) and all(np.array_equal(p, q) for p, q in zip(x, y, strict=True))
    for x, y in zip(a, b, strict=True)
  )


@settings(deadline=None, max_examples=60)
@given(
  sizes=lengths,
  row_tokens=st.integers(1, 20),
  rows=st.integers(1, 4),
  seed=st.none() | st.integers(0, 2**63),
  epochs=st.integers(1, 3),
)
def test_every_token_once_an_epoch(sizes, row_tokens, rows, seed, epochs):
  """Each document appears whole and in order once an epoch, cut only where a row ends;
  and the forest packs every full batch without padding."""
  source = documents(sizes)
  batches = list(
    packing.DocumentRows(
      source, row_tokens=row_tokens, rows=rows, seed=seed, epochs=epochs
    )
  )
  tokens = np.concatenate([piece for batch in batches for piece in batch])
  per_epoch = np.split(tokens, epochs)
  for epoch in per_epoch:
    runs = [list(g) for _, g in itertools.groupby(epoch, key=lambda t: t // 1000)]
    assert sorted(map(tuple, runs)) == sorted(tuple(d) for d in source if len(d))
  for batch in batches[:-1]:
    packed = forest.chain(batch, row_tokens=row_tokens, rows=rows)
    assert packed.num_tokens == rows * row_tokens
  assert sum(map(len, batches[-1])) <= rows * row_tokens


@settings(deadline=None, max_examples=60)
@given(
  sizes=lengths,
  row_tokens=st.integers(1, 20),
  seed=st.integers(0, 99),
  consumed=st.integers(0, 12),
  data=st.data(),
)
def test_document_rows_resume_at_the_exact_next_batch(
  sizes, row_tokens, seed, consumed, data
):
  """Law 5's data position: through JSON, at any moment, also in the middle of a
  document and across epochs; and with other rows the token stream is the same."""
  kwargs = {'row_tokens': row_tokens, 'seed': seed}
  source = documents(sizes)
  first = packing.DocumentRows(source, rows=2, **kwargs)
  for _ in range(consumed):
    next(first)
  state = json.loads(json.dumps(first.state()))
  rest = list(itertools.islice(first, 6))
  resumed = packing.DocumentRows(source, rows=2, state=state, **kwargs)
  assert equal(list(itertools.islice(resumed, 6)), rest)
  assert resumed.state() == first.state()
  rows = data.draw(st.integers(1, 3))
  other = packing.DocumentRows(source, rows=rows, state=state, **kwargs)
  got = np.concatenate(sum(itertools.islice(other, 12), []))
  want = np.concatenate(sum(rest, []))
  n = min(len(got), len(want))
  np.testing.assert_array_equal(got[:n], want[:n])


@st.composite
def conversations(draw):
  """Groups of samples; within a group some prefixes are common, none is in two."""
  groups = []
  for number in range(draw(st.integers(1, 6))):
    tail = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    tails = draw(st.lists(tail, min_size=1, max_size=4))
    tokens = [np.array([1000 + number, *tail], np.int32) for tail in tails]
    groups.append([forest.Sample(t, 1) for t in tokens])
  return groups


# In the next epoch the first begins as the last does, and is not merged with it.
_TURNS = [
  forest.Sample(np.array([1, *t], np.int32), 1) for t in ([0], [9, 9], [0] * 11)
]


@settings(deadline=None, max_examples=60)
@example(groups=[_TURNS], budget=13, seed=None, consumed=0)
@given(
  groups=conversations(),
  budget=st.integers(13, 60),
  seed=st.none() | st.integers(0, 99),
  consumed=st.integers(0, 12),
)
def test_sample_batches_fill_their_budget_and_resume(groups, budget, seed, consumed):
  """Whole samples, within the budget after merging, none left out that would still have
  fitted; and a sample that did not fit is the first of the next batch, also after a
  restart and in the middle of a group."""
  first = packing.SampleBatches(groups, tokens_per_batch=budget, seed=seed)
  for _ in range(consumed):
    next(first)
  state = json.loads(json.dumps(first.state()))
  rest = list(itertools.islice(first, 6))
  resumed = packing.SampleBatches(
    groups, tokens_per_batch=budget, seed=seed, state=state
  )
  again = list(itertools.islice(resumed, 6))
  assert [[id(s) for s in b] for b in again] == [[id(s) for s in b] for b in rest]
  for batch, following in itertools.pairwise(rest):
    assert merged(batch, groups) <= budget < merged([*batch, following[0]], groups)


def merged(batch, groups) -> int:
  """Tokens of a batch's prefix tree: groups in a batch are not merged with the same
  group of the next epoch."""
  places = {id(s): (n, i) for n, g in enumerate(groups) for i, s in enumerate(g)}
  nodes, known, before = 0, set(), (-1, 0)
  for sample in batch:
    place = places[id(sample)]
    if place[0] != before[0] or place <= before:
      known = set()  # another one, or the same in the next epoch
    before = place
    prefixes = {tuple(sample.tokens[:n]) for n in range(1, 1 + len(sample.tokens))}
    nodes += len(prefixes - known)
    known |= prefixes
  return nodes


def test_groups_are_trained_together_and_only_once():
  """The prompt of a conversation's turns is computed once in a batch."""
  prompt = list(range(20))
  turns = [forest.Sample(np.array([*prompt, 30 + i]), 20) for i in range(3)]
  batches = packing.SampleBatches([turns], tokens_per_batch=23, epochs=1)
  (batch,) = batches
  assert batch == turns
  rows = forest.merge(batch, row_tokens=32, row_terms=32)
  assert rows.num_tokens == 23


@given(count=st.integers(1, 20), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_samples_come_once_an_epoch_in_a_new_order(count, seed):
  """Each epoch is a permutation, and not the same one."""
  source = [[sample] for sample in samples([3] * count)]
  epochs = packing.SampleBatches(
    source, tokens_per_batch=3 * count, seed=seed, epochs=3
  )
  orders = [tuple(int(s.tokens[0]) // 1000 for s in batch) for batch in epochs]
  assert [sorted(o) for o in orders] == [list(range(count))] * 3
  if count > 8:
    assert len(set(orders)) == 3


def test_order_is_the_same_in_every_process_and_release():
  """A resumed run may be another Python process with another hash seed; and the numbers
  are written down, so that a change of the order between releases is seen here."""
  code = """
from m2jax.data.stream import Stream
s = Stream(range(10), seed=7, epochs=None)
print([s.index(i) for i in range(20)])
"""
  root = pathlib.Path(__file__).parents[2]
  outputs = {
    subprocess.run(
      [sys.executable, '-c', code],
      cwd=root,
      env={**os.environ, 'PYTHONHASHSEED': hash_seed},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for hash_seed in ('1', '2')
  }
  here = stream.Stream(range(10), seed=7, epochs=None)
  order = [here.index(i) for i in range(20)]
  assert outputs == {f'{order}\n'}
  assert order == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0] + [3, 9, 1, 6, 2, 5, 4, 8, 0, 7]


def test_a_state_of_other_data_is_refused():
  """Position 5 of other documents: some would be trained twice, some never."""
  source = documents([5, 6, 7])
  kwargs = {'row_tokens': 4, 'rows': 1}
  state = packing.DocumentRows(source, seed=1, **kwargs).state()
  with pytest.raises(stream.StateMismatch, match='seed: saved 1, now 2'):
    packing.DocumentRows(source, seed=2, state=state, **kwargs)
  with pytest.raises(stream.StateMismatch, match='items: saved 3, now 2'):
    packing.DocumentRows(source[:2], seed=1, state=state, **kwargs)


def test_bad_sources_are_named():
  """Each is a mistake that would otherwise loop for ever or train on nothing."""
  with pytest.raises(ValueError, match='no items'):
    packing.DocumentRows([], row_tokens=4, rows=1)
  with pytest.raises(ValueError, match='all documents of the source are empty'):
    next(packing.DocumentRows(documents([0, 0]), row_tokens=4, rows=1))
  groups = [[sample] for sample in samples([3, 9])]
  batches = packing.SampleBatches(groups, tokens_per_batch=8, seed=None)
  with pytest.raises(ValueError, match='group 1 has 9 tokens'):
    list(itertools.islice(batches, 3))


class TestStreams:
  """Streams side by side: many documents in a batch, and a part of it for each host."""

  @settings(deadline=None, max_examples=60)
  @given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    row_tokens=st.integers(1, 20),
    hosts=st.sampled_from([1, 2, 3]),
    streams_per_host=st.integers(1, 3),
    rows_per_stream=st.integers(1, 2),
    seed=st.integers(0, 99),
    consumed=st.integers(0, 6),
  )
  def test_hosts_share_one_stream(
    self, sizes, row_tokens, hosts, streams_per_host, rows_per_stream, seed, consumed
  ):
    """What the hosts read side by side is what one host would read, batch for batch; no
    two read the same position; and their states merge to the state of one host, from
    which any number of hosts goes on."""
    streams = hosts * streams_per_host
    common = {'row_tokens': row_tokens, 'rows': streams * rows_per_stream}
    common.update(streams=streams, seed=seed)
    source = documents(sizes)

    def open_hosts(state=None):
      return [
        packing.DocumentRows(source, host=(h, hosts), state=state, **common)
        for h in range(hosts)
      ]

    whole, parts = packing.DocumentRows(source, **common), open_hosts()
    for _ in range(consumed):
      assert equal([next(whole)], [sum((next(part) for part in parts), [])])
    states = json.loads(json.dumps([part.state() for part in parts]))
    own = [set(state['where']) for state in states]
    assert sum(map(len, own)) == len(set.union(*own)) == streams
    merged = packing.merge_states(states[::-1])
    assert merged == whole.state()
    rest = list(itertools.islice(whole, 4))
    again = packing.DocumentRows(source, state=merged, **common)
    assert equal(list(itertools.islice(again, 4)), rest)
    parts = open_hosts(merged)
    for want in rest:
      assert equal([want], [sum((next(part) for part in parts), [])])

  @settings(deadline=None, max_examples=40)
  @given(
    count=st.integers(1, 12),
    streams=st.integers(1, 5),
    seed=st.none() | st.integers(0, 99),
  )
  def test_each_document_once_an_epoch(self, count, streams, seed):
    """Over all streams together, however far one is ahead of another."""
    source = documents([3] * count)
    rows = packing.DocumentRows(
      source, row_tokens=3, rows=streams, streams=streams, seed=seed
    )
    epochs = 2 * streams  # after which a whole number of batches is full
    pieces = sum((next(rows) for _ in range(count * epochs // streams)), [])
    found = np.bincount([int(piece[0]) // 1000 for piece in pieces])
    np.testing.assert_array_equal(found, epochs)

  def test_a_batch_has_many_documents(self):
    """Documents longer than a batch do not make batches of one document."""
    source = documents([100_000] * 8)
    rows = packing.DocumentRows(source, row_tokens=16, rows=8, streams=4, seed=1)
    for _ in range(3):
      assert len({id(piece.base) for piece in next(rows)}) == 4

  def test_batches_fill_the_forest(self):
    """The rows of all streams pack into the forest without padding."""
    source = documents([5, 9, 2, 30, 7])
    rows = packing.DocumentRows(source, row_tokens=8, rows=6, streams=3, seed=1)
    for batch in itertools.islice(rows, 5):
      assert forest.chain(batch, row_tokens=8, rows=6).num_tokens == 48

  def test_rows_and_length_may_change(self):
    """A later stage of longer rows goes on with each stream's tokens."""
    source, common = documents([50, 60, 70, 80]), {'streams': 2, 'seed': 3}
    first = packing.DocumentRows(source, row_tokens=8, rows=4, **common)
    next(first)
    longer = packing.DocumentRows(
      source, row_tokens=32, rows=2, state=first.state(), **common
    )
    per_stream = [np.concatenate(next(first)).reshape(2, -1) for _ in range(2)]
    want = np.concatenate(per_stream, axis=1)
    np.testing.assert_array_equal(np.concatenate(next(longer)).reshape(2, -1), want)

  @pytest.mark.parametrize(
    ('more', 'match'),
    [
      ({'rows': 4, 'streams': 3}, 'streams must divide rows'),
      ({'rows': 4, 'streams': 4, 'host': (0, 3)}, 'number of hosts'),
      ({'rows': 4, 'streams': 4, 'host': (2, 2)}, 'number of hosts'),
      ({'rows': 4, 'streams': 2, 'epochs': 1}, 'needs a single stream'),
    ],
  )
  def test_bad_arguments_are_named(self, more, match):
    """A wrong split would train something twice or never."""
    with pytest.raises(ValueError, match=match):
      packing.DocumentRows(documents([5]), row_tokens=4, **more)

  def test_states_of_other_streams_are_errors(self):
    """Half of a state, or one of another division, would lose documents."""
    source, common = documents([5, 6, 7]), {'row_tokens': 4, 'rows': 4}
    states = [
      packing.DocumentRows(source, streams=4, host=(h, 2), **common).state()
      for h in range(2)
    ]
    with pytest.raises(stream.StateMismatch, match='streams: saved 4, now 2'):
      packing.DocumentRows(source, streams=2, state=states[0], **common)
    with pytest.raises(stream.StateMismatch, match='lacks stream 2'):
      packing.DocumentRows(source, streams=4, state=states[0], **common)
    with pytest.raises(stream.StateMismatch, match='2 of 4 streams'):
      packing.merge_states(states[:1])
    other = packing.DocumentRows(source, streams=4, seed=9, **common).state()
    with pytest.raises(stream.StateMismatch, match='of different iterators'):
      packing.merge_states([states[0], other])


def test_grain_sources_are_sources():
  """A finite MapDataset of grain works as it is, its own transformations included."""
  dataset = grain.MapDataset.source(documents([4, 4, 4])).map(lambda d: d + 1)
  batches = packing.DocumentRows(dataset, row_tokens=6, rows=1, seed=3, epochs=1)
  tokens = np.concatenate([piece for batch in batches for piece in batch])
  want = np.concatenate(documents([4, 4, 4])) + 1
  np.testing.assert_array_equal(np.sort(tokens), want)


class TestTextFiles:
  """Text on disk to token arrays."""

  @pytest.fixture
  def root(self, tmp_path):
    for name in ('b.py', 'a.py', 'pkg/c.py', 'pkg/tests/d.py', 'notes.txt'):
      path = tmp_path / name
      path.parent.mkdir(exist_ok=True, parents=True)
      path.write_text(f'# {name} é\n', encoding='utf-8')
    return tmp_path

  def names(self, root, paths):
    return [p.relative_to(root).as_posix() for p in paths]

  def test_find_is_sorted_and_excludes_directories(self, root):
    """The order must not depend on the file system."""
    paths = text_files.find(root, ('.py',), exclude_dirs=('tests',))
    assert self.names(root, paths) == ['a.py', 'b.py', 'pkg/c.py']

  def test_nothing_found_is_an_error(self, root):
    with pytest.raises(FileNotFoundError, match='no file in .* ends in .md or .rst'):
      text_files.find(root, ('.md', '.rst'))
    with pytest.raises(FileNotFoundError, match='absent does not exist'):
      text_files.find(root / 'absent')

  def test_documents_are_encoded_text(self, root):
    """Bytes that are no UTF-8 must not end a run."""
    (root / 'odd.py').write_bytes(b'caf\xe9')
    paths = text_files.find(root, ('.py',), exclude_dirs=('pkg',))
    texts = text_files.TextFiles(paths, root=root)
    source = Encoded(texts, lambda text: [ord(c) for c in text] + [0])
    assert len(source) == 3 and texts[2].name == texts.name(2) == 'odd.py'
    assert ''.join(map(chr, source[0])) == '# a.py é\n\0'
    assert ''.join(map(chr, source[2])) == 'caf\N{REPLACEMENT CHARACTER}\0'

  def test_changed_files_are_noticed_on_resume(self, root):
    """The position counts documents and tokens of the files as they were."""
    paths = text_files.find(root, ('.py',))

    def rows(state=None):
      source = text_files.TextFiles(paths, root=root)
      source = Encoded(source, lambda text: list(text.encode()))
      return packing.DocumentRows(source, row_tokens=4, rows=1, state=state)

    batches = rows()
    next(batches)
    state = batches.state()
    rows(state)
    (root / 'a.py').write_text('longer than it was before')
    with pytest.raises(stream.StateMismatch, match='fingerprint'):
      rows(state)
