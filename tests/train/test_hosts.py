"""Pre-training over several processes: each host reads its own rows of one stream."""

from __future__ import annotations

import json
from unittest import mock

import jax
import numpy as np
import pytest

from m2jax import sharding as sharding_lib
from m2jax.data.stream import StateMismatch
from m2jax.train import hosts, stages
from tests import processes as processes_lib
from tests.train import test_pretrain


def run(directory, mesh, *, steps, devices, processes=1):
  """What each process of a run in `directory` printed."""
  fields = dict(directory=str(directory), mesh=mesh, steps=steps, devices=devices)
  return processes_lib.together('tests.train.hosts_worker', processes, fields)


@pytest.mark.long
def test_hosts_read_apart_and_train_together(tmp_path):
  """Two processes read no document in common, see the losses of one device, and save
  one position, with which one process goes on; two that hold the same rows (their
  tokens are split, not their rows) read the same."""
  (alone,) = run(tmp_path / 'alone', {}, steps=6, devices=1)
  directory = tmp_path / 'run'
  first = run(directory, dict(fsdp=2, tensor=2), steps=3, devices=2, processes=2)
  assert [one['host'] for one in first] == [[0, 2], [1, 2]]
  assert not set(first[0]['read']) & set(first[1]['read'])
  (second,) = run(directory, dict(expert=2), steps=4, devices=2)
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
  ('processes', 'want'),
  [
    ([0, 0, 1, 1, 2, 2, 3, 3], (1, 4, (2, 3))),
    ([0, 1, 2, 3, 0, 1, 2, 3], (1, 4, (1, 5))),
    # unequal parts: everyone reads all
    ([0] * 6 + [1] * 2, (0, 1, tuple(range(8)))),
  ],
)
def test_who_reads_what(processes, want):
  """A process's part is the shards of rows that its devices hold."""
  where = mock.Mock()
  where.devices_indices_map.return_value = {
    Device(process): (slice(row, row + 1),) for row, process in enumerate(processes)
  }
  sharding = mock.Mock(size=mock.Mock(return_value=8))
  with (
    mock.patch.object(hosts, 'NamedSharding', return_value=where),
    mock.patch.object(jax, 'process_index', return_value=1),
  ):
    found = hosts.find(sharding)
  assert (found.index, found.count, found.shards) == want
  assert hosts.find(sharding_lib.ONE_DEVICE) == hosts.Hosts()


def test_batches_of_hosts_are_the_batch():
  """Through both stages: what the hosts read side by side is the batch of one host, and
  their merged state is its state, from which any number goes on."""
  source = test_pretrain.documents()
  config = test_pretrain.config()

  def rows(count, state=None):
    return [
      stages.StagedRows(config, [source] * 2, seed=1, state=state, host=(h, count))
      for h in range(count)
    ]

  (whole,), parts = rows(1), rows(2)
  for number in range(6):
    batch, pieces = next(whole), [next(part) for part in parts]
    arrays = sum((piece.arrays for piece in pieces), [])
    assert test_pretrain.same(batch, pieces[0]._replace(arrays=arrays))
    merged = stages.merge_states([part.state() for part in reversed(parts)])
    assert json.loads(json.dumps(merged)) == json.loads(json.dumps(whole.state()))
    if number in (1, 4):
      parts = rows(2, merged)
  with pytest.raises(StateMismatch, match='1 of 2 streams'):
    stages.merge_states([parts[0].state()])
  next(parts[0])
  with pytest.raises(StateMismatch, match='not of one'):
    stages.merge_states([part.state() for part in parts])


def test_rows_must_divide():
  """Named before anything is compiled."""
  with pytest.raises(ValueError, match='6 rows of a batch do not divide over 4 hosts'):
    hosts.Hosts(0, 4).check(6)
  config = test_pretrain.config(streams=1)
  with pytest.raises(ValueError, match='number of hosts'):
    stages.StagedRows(config, [[np.ones(3)]] * 2, seed=1, host=(0, 2))
