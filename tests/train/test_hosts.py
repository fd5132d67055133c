"""Pre-training over several processes: each host reads its own rows of one stream."""

from __future__ import annotations

import functools
import json
import threading
from concurrent import futures
from unittest import mock

import jax
import numpy as np
import pytest

from m2jax import forest
from m2jax import sharding as sharding_lib
from m2jax.data.stream import StateMismatch
from m2jax.train import chunks, hosts, stages
from tests import processes as processes_lib
from tests.train import test_pretrain


def run(directory, mesh, *, steps, devices, processes=1, **more):
  """What each process of a run in `directory` printed."""
  fields = dict(directory=str(directory), mesh=mesh, steps=steps, devices=devices)
  fields.update(more)
  return processes_lib.together('tests.train.hosts_worker', processes, fields)


@pytest.mark.thorough
def test_hosts_read_apart_and_train_together(tmp_path):
  """Two processes read no document in common, see the losses of one device, go to the
  second stage's own mesh and save one position, with which one process goes on; two
  that hold the same rows (their tokens are split, not their rows) read the same."""
  (alone,) = run(tmp_path / 'alone', {}, steps=6, devices=1)
  directory = tmp_path / 'run'
  first = run(
    directory,
    dict(fsdp=2, tensor=2),
    second_mesh=dict(data=2, expert=2),
    steps=3,
    devices=2,
    processes=2,
  )
  assert [one['host'] for one in first] == [[0, 2], [1, 2]]
  assert not set(first[0]['read']) & set(first[1]['read'])
  (second,) = run(
    directory, dict(expert=2), second_mesh=dict(data=2), steps=4, devices=2
  )
  third = run(directory, dict(context=4), steps=6, devices=2, processes=2)
  assert [one['host'] for one in third] == [[0, 1], [0, 1]]
  assert third[0]['read'] == third[1]['read']
  for pair in (first, third):
    for name in ('losses', 'consumed', 'data'):
      assert pair[0][name] == pair[1][name]
  parts = (first[0], second, third[0])
  losses = sum((part['losses'] for part in parts), [])
  assert losses == pytest.approx(alone['losses'], rel=1e-4)
  assert sum((part['consumed'] for part in parts), []) == alone['consumed']
  assert third[0]['data'] == alone['data']  # the very next token of every stream


class Device:
  """A device of some process, for a mesh that is only looked at."""

  def __init__(self, process):
    self.process_index = process


@pytest.mark.parametrize(
  ('held', 'streams', 'want'),
  [
    ('0 0 1 1 2 2 3 3', 0, (1, 4, (2, 3))),
    ('0 1 2 3 0 1 2 3', 0, (1, 4, (1, 5))),
    # each of two processes has a part of every row
    ('01 01 01 01', 0, (0, 1, (0, 1, 2, 3))),
    # 0 and 2 have no shard in common with each other alone, but through 1
    ('01 12 1 34 43 34', 0, (0, 2, (0, 1, 2))),
    # more hosts than streams: neighbours read the same rows
    ('0 1 2 3', 2, (0, 2, (0, 1))),
    ('0 1 2 3', 6, (0, 2, (0, 1))),
    # unequal parts: everyone reads all
    ('0 0 0 1', 0, (0, 1, (0, 1, 2, 3))),
  ],
)
def test_who_reads_what(held, streams, want):
  """Processes with a shard of rows in common are one host, and hosts divide streams.
  `held` are the processes that have each shard; the answer is that of process 1."""
  shards = held.split()
  where = mock.Mock()
  where.devices_indices_map.return_value = {
    Device(int(process)): (slice(row, row + 1),)
    for row, processes in enumerate(shards)
    for process in processes
  }
  sharding = mock.Mock(size=mock.Mock(return_value=len(shards)))
  with (
    mock.patch.object(hosts, 'NamedSharding', return_value=where),
    mock.patch.object(jax, 'process_index', return_value=1),
  ):
    found = hosts.find(sharding, streams)
  assert (found.index, found.count, found.shards) == want
  assert hosts.find(sharding_lib.ONE_DEVICE) == hosts.Hosts()


class Hosts:
  """The hosts of a run as threads: what they gather goes to all of them."""

  def __init__(self, config, sources, hosts, state=None):
    """`hosts`: of each host, its (h, H) in each stage."""
    self._barrier, self._said = threading.Barrier(len(hosts)), {}
    self._pool = futures.ThreadPoolExecutor(len(hosts))
    self._numbers = range(len(hosts))
    self._parts = [
      stages.StagedRows(
        config,
        sources,
        seed=1,
        state=state,
        hosts=parts,
        gather=functools.partial(self._gather, number),
      )
      for number, parts in enumerate(hosts)
    ]

  def _gather(self, number, said):
    self._said[number] = said
    self._barrier.wait(10)
    heard = [self._said[n] for n in self._numbers]
    self._barrier.wait(10)
    return heard

  def batches(self, number=1):
    """The next batches, each a list of the hosts' `Pieces`."""
    return [list(self._pool.map(next, self._parts)) for _ in range(number)]

  def state(self):
    """The one position of all hosts."""
    first, *others = self._pool.map(lambda part: part.state(), self._parts)
    assert all(other == first for other in others)
    return json.loads(json.dumps(first))


def test_batches_of_hosts_are_the_batch():
  """Through both stages, with other hosts in each: what the hosts read side by side is
  the batch of one host, and their position is its position, from which any number goes
  on."""
  source = test_pretrain.documents()
  config = test_pretrain.config()
  whole = stages.StagedRows(config, [source] * 2, seed=1)
  two = [[(0, 2), (0, 1)], [(1, 2), (0, 1)]]  # apart, then both read all
  hosts_ = Hosts(config, [source] * 2, two)
  for number in range(8):
    batch, (pieces,) = next(whole), hosts_.batches()
    if number >= 3:
      assert all(map(test_pretrain.same, pieces, [batch, batch]))
    else:
      arrays = sum((piece.arrays for piece in pieces), [])
      assert test_pretrain.same(batch, pieces[0]._replace(arrays=arrays))
    position = hosts_.state()
    assert position == json.loads(json.dumps(whole.state()))
    if number in (1, 2, 4):  # 2: the last batch of the stage
      hosts_ = Hosts(config, [source] * 2, two, position)


def same_in_both_stages(*hosts_):
  return [[host] * 2 for host in hosts_]


PAIRS = same_in_both_stages(*((h // 2, 4) for h in range(8)))  # 8 hosts of 4 streams
MESHES = [[(h, 4), (h // 2, 2)] for h in range(4)]  # another mesh in the second stage


@pytest.mark.parametrize('before', [1, 3, 4])
@pytest.mark.parametrize(
  'resumed',
  [
    same_in_both_stages((0, 1)),
    same_in_both_stages(*((h, 4) for h in range(4))),
    PAIRS,
    MESHES,
  ],
  ids=['one', 'four', 'pairs', 'meshes'],
)
def test_every_document_is_read_once(before, resumed):
  """Two hosts of two streams each stop in the first stage, between the stages or in the
  second; other hosts go on: in an epoch each token comes once, none twice."""
  tokens = np.arange(64 * 12).reshape(64, 12)  # 64 documents, all tokens different
  config = test_pretrain.config(
    stages=((16, 8, 3 * 128), (32, 4, 0)), streams=4, phases=stages.PhasesConfig()
  )
  two = Hosts(config, [list(tokens)] * 2, same_in_both_stages((0, 2), (1, 2)))
  seen = tokens_of(two.batches(before), range(2))
  others = Hosts(config, [list(tokens)] * 2, resumed, two.state())
  for batch in others.batches(6 - before):
    number = 0 if batch[0].stage.context == 16 else 1
    first = {host[number]: h for h, host in reversed(list(enumerate(resumed)))}
    for h, host in enumerate(resumed):  # hosts of the same rows agree about them
      assert test_pretrain.same(batch[h], batch[first[host[number]]])
    assert len(first) == resumed[0][number][1]
    seen += tokens_of([batch], first.values())
  assert sorted(seen) == list(range(tokens.size))


def tokens_of(batches, numbers):
  """All tokens of some hosts' parts of batches."""
  pieces = [batch[number] for batch in batches for number in numbers]
  return [int(t) for piece in pieces for array in piece.arrays for t in array]


def test_positions_to_merge():
  """Of all hosts, and of the same batch."""
  source, config = test_pretrain.documents(), test_pretrain.config()

  def part(host):
    rows = stages.StagedRows(config, [source] * 2, seed=1, hosts=[host] * 2)
    return rows, {'step': 0, 'stage': 0, 'rows': rows._rows.state()}

  (first, state), (_, other) = part((0, 2)), part((1, 2))
  assert stages.merge_states([other, state])['rows']['where'].keys() == {'0', '1'}
  with pytest.raises(StateMismatch, match='1 of 2 streams'):
    first.state()
  with pytest.raises(StateMismatch, match='not of one'):
    stages.merge_states([state, {**other, 'step': 1}])
  moved = {**state, 'rows': {**state['rows'], 'where': {'0': [2, 0]}}}
  with pytest.raises(StateMismatch, match='different iterators'):
    stages.merge_states([state, other, moved])


def test_rows_must_divide():
  """Named before anything is compiled."""
  with pytest.raises(ValueError, match='6 rows of a batch do not divide over 4 hosts'):
    hosts.Hosts(0, 4).check(6)
  config = test_pretrain.config(streams=1)
  with pytest.raises(ValueError, match='number of hosts'):
    stages.StagedRows(config, [[np.ones(3)]] * 2, seed=1, hosts=[(0, 2)] * 2)


@pytest.mark.parametrize('index', [0, 1])
def test_one_host_has_the_row_of_a_chunk(monkeypatch, index):
  """All hosts read the same row, and it counts once: that of the others is empty."""
  row = forest.chain([np.arange(1, 5)], row_tokens=8, row_terms=8)
  mesh = sharding_lib.abstract_mesh(sharding_lib.MeshConfig(fsdp=4))
  where = sharding_lib.Sharding(mesh, sharding_lib.PRESETS['fsdp'])
  monkeypatch.setattr(hosts, 'place', lambda batch, *_: batch)
  placed = chunks._place(row, where, hosts.Hosts(index, 2, (2 * index, 2 * index + 1)))
  assert placed.tokens.shape == (2, 8)
  assert (placed.multiplicity.sum(1) > 0).tolist() == [index == 0, False]
