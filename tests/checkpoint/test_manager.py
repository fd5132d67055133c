"""What a checkpoint restores, and which input it rejects."""

import collections
import dataclasses
import pathlib
import shutil
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax.checkpoint import (
  CheckpointManager,
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
  StorageError,
)

Moments = collections.namedtuple('Moments', ['mu', 'nu'])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learner:
  step: jax.Array
  params: dict
  opt_state: tuple
  key: jax.Array


def make_learner(seed=0) -> Learner:
  keys = jax.random.split(jax.random.key(seed), 4)
  params = {
    'embed': jax.random.normal(keys[0], (16, 8)),
    'layers': {'q': jax.random.normal(keys[1], (2, 8, 8), jnp.bfloat16)},
    'nan': jnp.array([jnp.nan, -0.0, jnp.inf]),
  }
  opt_state = (optax.EmptyState(), Moments(params, [jnp.arange(3, dtype=jnp.uint32)]))
  return Learner(jnp.int32(7), params, opt_state, keys[2])


def plain(tree):
  """Leaves as numpy bytes, PRNG keys as their data."""

  def one(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    return (leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes())

  return jax.tree.map(one, tree)


@pytest.fixture
def saved(tmp_path):
  """A directory with steps 1 and 2 of different learners."""
  with CheckpointManager(tmp_path / 'run', keep=None) as manager:
    for step in (1, 2):
      manager.save(
        step, make_learner(step), {'head': step}, {'tokenizer.json': b'{}' * step}
      )
  return tmp_path / 'run'


def test_round_trip_is_bit_exact(saved):
  """A resumed run must not differ in one bit: dataclasses, named tuples, bf16, NaN,
  -0.0, uint32 and typed PRNG keys included; and the keys must draw the same numbers."""
  learner = make_learner(2)
  restored = CheckpointManager(saved).restore(like=jax.eval_shape(make_learner))
  assert restored.step == 2
  assert isinstance(restored.state, Learner)
  assert jax.tree.structure(restored.state) == jax.tree.structure(learner)
  assert plain(restored.state) == plain(learner)
  draws = [jax.random.normal(key, (4,)) for key in (restored.state.key, learner.key)]
  np.testing.assert_array_equal(*draws)
  assert restored.host == {'head': 2}
  assert restored.files == {'tokenizer.json': b'{}{}'}


def test_restores_an_earlier_step_without_knowing_its_structure(saved):
  """Tools look into checkpoints without the classes that made them."""
  restored = CheckpointManager(saved, read_only=True).restore(1)
  assert restored.step == 1
  assert restored.host == {'head': 1}
  want = make_learner(1)
  np.testing.assert_array_equal(restored.state['params']['embed'], want.params['embed'])
  assert isinstance(restored.state['params']['embed'], np.ndarray)


def test_partial_restore_reads_only_what_is_asked(saved):
  """Serving loads weights without the optimizer; a typing error must still be seen."""
  manager = CheckpointManager(saved, read_only=True)
  like = {'params': jax.eval_shape(make_learner).params}
  restored = manager.restore(like=like, partial=True)
  assert plain(restored.state['params']) == plain(make_learner(2).params)
  with pytest.raises(CheckpointMismatch, match='opt_state/1/mu/embed: saved float32'):
    manager.restore(like=like)
  with pytest.raises(CheckpointMismatch, match='weights: not in the checkpoint'):
    manager.restore(like={'weights': jnp.zeros(3)}, partial=True)


def test_host_part_is_read_without_the_arrays(saved):
  """What a checkpoint says about itself must not cost reading gigabytes: it comes even
  where the arrays are gone; which step, and what is missing, is as for `restore`."""
  manager = CheckpointManager(saved, read_only=True)
  assert manager.read_host() == ({'head': 2}, {'tokenizer.json': b'{}{}'}, 2)
  shutil.rmtree(saved / '1' / 'state')
  assert manager.read_host(1) == ({'head': 1}, {'tokenizer.json': b'{}'}, 1)
  with pytest.raises(CorruptCheckpoint):
    manager.restore(1)
  with pytest.raises(MissingCheckpoint, match='step 9'):
    manager.read_host(9)
  damage_truncate(saved / '2' / 'host' / 'host.json')
  with pytest.raises(CorruptCheckpoint, match=f'{saved}/2'):
    manager.read_host()


def test_the_caller_may_go_on_at_once(tmp_path):
  """The save is asynchronous: donated device buffers, numpy arrays changed in place and
  a ledger that grows during the save must not reach the disk."""
  big = {f'w{i}': jnp.full((256, 1024), 1.0) for i in range(8)}
  counts = np.ones(100_000)
  host = {'taken': [1]}
  donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
  jax.block_until_ready(donate(jax.tree.map(jnp.copy, big)))  # compile before
  with CheckpointManager(tmp_path) as manager:
    manager.save(1, {'big': big, 'counts': counts}, host)
    host['taken'].append(2)
    counts[:] = 2
    jax.block_until_ready(donate(big))
    manager.wait()
    restored = manager.restore()
  assert restored.host == {'taken': [1]}
  for leaf in jax.tree.leaves(restored.state):
    np.testing.assert_array_equal(leaf, 1)


def test_keeps_the_newest_steps(tmp_path):
  """Disks are finite; the newest `keep` and every keep_every_steps-th stay."""
  with CheckpointManager(tmp_path, keep=2, keep_every_steps=4) as manager:
    assert manager.latest_step() is None
    for step in range(1, 8):
      manager.save(step, {'x': jnp.int32(step)})
  assert CheckpointManager(tmp_path, read_only=True).steps() == [4, 6, 7]


def test_a_reader_changes_nothing_and_a_writer_clears_the_leftovers(saved):
  """An evaluation next to a running job must not delete the save in progress; the
  job's own restart must, and neither takes it for a step."""
  unfinished = saved / '3.orbax-checkpoint-tmp'
  shutil.copytree(saved / '2', unfinished)
  (unfinished / 'commit_success.txt').unlink()
  assert CheckpointManager(saved, read_only=True).latest_step() == 2
  assert unfinished.exists()
  with CheckpointManager(saved) as manager:
    assert manager.latest_step() == 2
    manager.save(3, {'x': jnp.zeros(1)})
  assert not unfinished.exists()


class TestMissing:
  """`MissingCheckpoint` says what was looked for and what is there instead."""

  def test_no_directory(self, tmp_path):
    manager = CheckpointManager(tmp_path / 'absent', read_only=True)
    with pytest.raises(MissingCheckpoint, match='absent is not a directory'):
      manager.restore()
    assert not (tmp_path / 'absent').exists()

  def test_not_a_checkpoint_directory(self, tmp_path):
    (tmp_path / 'metrics.jsonl').touch()
    with pytest.raises(MissingCheckpoint, match=r"it contains \['metrics.jsonl'\]"):
      CheckpointManager(tmp_path, read_only=True).restore()

  def test_no_such_step(self, saved):
    with pytest.raises(MissingCheckpoint, match=r'step 9 .* it has steps \[1, 2\]'):
      CheckpointManager(saved).restore(9)


def test_mismatch_names_every_leaf(saved):
  """The person who changed a config must see which parameters no longer fit."""
  like = jax.eval_shape(make_learner)
  like.params['embed'] = jax.ShapeDtypeStruct((16, 9), jnp.float32)
  like.params['layers'] = {'q': jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)}
  like.params['new'] = jnp.zeros(3)
  del like.params['nan']
  with pytest.raises(CheckpointMismatch) as error:
    CheckpointManager(saved).restore(like=like)
  lines = str(error.value).splitlines()
  assert str(saved / '2') in lines[0]
  assert {line.strip() for line in lines[1:]} == {
    'params/embed: saved float32[16,8], requested float32[16,9]',
    'params/layers/q: saved bfloat16[2,8,8], requested float32[2,8,8]',
    'params/new: not in the checkpoint, requested float32[3]',
    'params/nan: saved float32[3], not requested',
  }


def damage_truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


# Orbax leaves the coroutines of its other reads behind when one fails.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('damage', [damage_truncate, damage_flip, pathlib.Path.unlink])
def test_damage_is_never_restored_as_data(saved, tmp_path, damage):
  """Whatever file of a step is cut, flipped or gone: either the restore is exact all
  the same (the file is redundant), or CorruptCheckpoint names the step; and the array
  data, the ledger and the caller's files are not redundant."""
  want = plain(make_learner(2))
  caught = set()
  files = [p for p in (saved / '2').rglob('*') if p.is_file() and p.stat().st_size]
  for file in files:
    copy = tmp_path / 'damaged'
    shutil.copytree(saved, copy)
    damage(copy / file.relative_to(saved))
    try:
      manager = CheckpointManager(copy, read_only=True)
      restored = manager.restore(2, like=jax.eval_shape(make_learner))
    except CorruptCheckpoint as error:
      assert str(copy / '2') in str(error)
      assert f'other steps in {copy}: [1]' in str(error)
      caught.add(file.name)
    except MissingCheckpoint:
      assert file.name == 'commit_success.txt'
    else:
      assert plain(restored.state) == want, file
      assert (restored.host, restored.files) == (
        {'head': 2},
        {'tokenizer.json': b'{}{}'},
      ), file
    shutil.rmtree(copy)
  assert {'host.json', 'leaves.json', 'tokenizer.json', 'manifest.ocdbt'} <= caught
  data_files = [f for f in files if f.parent.name == 'd']
  assert any(f.name in caught for f in data_files)


class TestRefusals:
  """State that cannot be saved exactly is rejected before anything is written."""

  def rejects(self, manager, error, match, *args):
    with pytest.raises(error, match=match):
      manager.save(*args)
    assert manager.latest_step() is None

  def test_before_anything_is_written(self, tmp_path):
    state = {'x': jnp.zeros(1)}
    with CheckpointManager(tmp_path) as manager:
      self.rejects(manager, TypeError, "leaf 'a/b' is a str", 1, {'a': {'b': 'text'}})
      self.rejects(manager, ValueError, 'one array', 1, jnp.zeros(1))
      self.rejects(manager, TypeError, 'JSON', 1, state, {'x': {1, 2}})
      # JSON would make the key '7': a ledger would come back with other ids.
      self.rejects(
        manager, TypeError, 'taken` has the key 7', 1, state, {'taken': {7: 1}}
      )
      for name in ('../up', 'a/b', '', '..', 'host.json', 'manifest.json'):
        self.rejects(manager, ValueError, 'file name', 1, state, {}, {name: b''})

  def test_step_must_be_new(self, saved):
    """A step is one commit: it is never written twice, nor behind a later one."""
    with CheckpointManager(saved) as manager:
      for step in (1, 2):
        with pytest.raises(ValueError, match=f'step {step} is not after .* step 2'):
          manager.save(step, {'x': jnp.zeros(1)})

  def test_read_only(self, saved):
    with pytest.raises(ValueError, match='read_only'):
      CheckpointManager(saved, read_only=True).save(3, {'x': jnp.zeros(1)})


def test_an_outage_is_no_error_of_the_user(saved, monkeypatch):
  """Storage that is away raises ValueErrors. They are StorageErrors here, in a save and
  in a read, and not an invalid step or a corrupt checkpoint: a job that meets one may
  be started again as it is."""

  def away(*args, **options):
    raise ValueError('UNAVAILABLE: gs://bucket: HTTP response code: 503')

  with CheckpointManager(saved) as manager:
    with monkeypatch.context() as patch:
      patch.setattr(manager._orbax, 'save', away)
      with pytest.raises(StorageError, match='UNAVAILABLE'):
        manager.save(3, {'x': jnp.zeros(1)})
    with pytest.raises(ValueError, match='not after'):
      manager.save(2, {'x': jnp.zeros(1)})
    monkeypatch.setattr('orbax.checkpoint.Checkpointer.restore', away)
    with pytest.raises(StorageError, match='UNAVAILABLE'):
      manager.restore()


def test_a_failed_background_save_is_raised_and_leaves_no_step(tmp_path, monkeypatch):
  """A full disk shows itself in a thread; the training loop must hear of it."""
  from m2jax.checkpoint import files

  def full(*args, **kwargs):
    raise OSError(28, 'No space left on device')

  with CheckpointManager(tmp_path) as manager:
    manager.save(1, {'x': jnp.zeros(1)})
    manager.wait()
    with monkeypatch.context() as patch:
      patch.setattr(files.zlib, 'crc32', full)
      with pytest.raises(OSError, match='No space left'):
        manager.save(2, {'x': np.zeros(1)})
        manager.wait()
    assert manager.latest_step() == 1
    manager.save(3, {'x': jnp.zeros(1)})
    manager.wait()
    assert manager.steps() == [1, 3]


@pytest.mark.parametrize('moment', ['before', 'after'])
def test_ctrl_c_during_a_save_leaves_the_step_whole(tmp_path, monkeypatch, moment):
  """Interrupted between Orbax's own lines it would forget the threads it had started,
  which then wrote into a shutting-down program: the interrupt may not reach it."""
  from orbax import checkpoint as ocp

  save = ocp.CheckpointManager.save

  def interrupted(self, *args, **kwargs):
    if moment == 'after':
      save(self, *args, **kwargs)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.2)  # the main thread takes its interrupt
    return moment == 'after' or save(self, *args, **kwargs)

  with CheckpointManager(tmp_path) as manager:
    monkeypatch.setattr(ocp.CheckpointManager, 'save', interrupted)
    with pytest.raises(KeyboardInterrupt):
      manager.save(1, {'x': jnp.zeros(1)})
  assert CheckpointManager(tmp_path, read_only=True).steps() == [1]
