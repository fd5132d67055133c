"""The verifier: exact about the end state, robust against hostile workspaces."""

import gc
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.tasks import verify
from tests.tasks.local_shell import put

FILES = {'a.py': b'one\ntwo\n', 'b.txt': b'three\n'}


@pytest.fixture
def box(tmp_path):
  directory = tmp_path / 'box'
  directory.mkdir()
  put(directory, FILES)
  return directory


def test_expected_state_succeeds(box):
  """The basic verdicts that every task relies on."""
  assert verify.Expected(FILES)(box, 'anything') == 1.0
  assert verify.Expected(FILES)(box, ' \n') == 0.0  # an empty answer fails
  assert verify.Expected(FILES, '12')(box, '12') == 1.0
  assert verify.Expected(FILES, '12')(box, '13') == 0.0


def workspaces(*names):
  return st.dictionaries(st.sampled_from(names), st.binary(max_size=6), min_size=1)


@settings(deadline=None, max_examples=60)
@given(expected=workspaces('a', 'b', 'c'), found=workspaces('a', 'b', 'c', 'd/a'))
def test_succeeds_exactly_when_files_are_equal(tmp_path_factory, expected, found):
  """Any difference in names or bytes, on any file, is a failure; none is a success."""
  directory = tmp_path_factory.mktemp('box')
  put(directory, found)
  assert verify.Expected(expected)(directory, 'done') == float(expected == found)


flat = st.dictionaries(st.sampled_from('abcd'), st.binary(max_size=2), min_size=1)


@settings(deadline=None, max_examples=100)
@given(before=flat, expected=flat, found=flat, said=st.sampled_from(['7', '8']))
def test_partial_credit_is_the_share_of_what_had_to_change(
  tmp_path_factory, before, expected, found, said
):
  """Required changes count, unwanted ones are subtracted; at least 0."""
  directory = tmp_path_factory.mktemp('box')
  put(directory, found)
  judge = verify.Expected(expected, '7', before=before, partial_credit=0.5)
  right, asked, spoiled = float(said == '7'), 1, 0
  for path in {*before, *expected}:
    if before.get(path) != expected.get(path):
      asked += 1
      right += found.get(path) == expected.get(path)
    else:
      spoiled += found.get(path) != expected.get(path)
  spoiled += bool(found.keys() - before.keys() - expected.keys())
  whole = found == expected and said == '7'
  want = 1.0 if whole else 0.5 * max(0.0, right - spoiled) / asked
  assert judge(directory, said) == want


def test_partial_credit_follows_no_link(tmp_path):
  """A link to a file with the right bytes is not that file."""
  (tmp_path / 'outside').write_bytes(b'new')
  box = tmp_path / 'box'
  box.mkdir()
  (box / 'a').symlink_to(tmp_path / 'outside')
  (box / 'b').write_bytes(b'new')
  before, after = {'a': b'old', 'b': b'old'}, {'a': b'new', 'b': b'new'}
  judge = verify.Expected(after, before=before, partial_credit=1.0)
  assert judge(box, 'done') == 0.5
  (box / 'b').unlink()
  os.mkfifo(box / 'b')
  assert judge(box, 'done') == 0.0
  with pytest.raises(ValueError, match='without directories'):
    verify.Expected({'d/a': b''})


def _replace_by_link(box):
  (box.parent / 'outside').write_bytes(FILES['a.py'])
  (box / 'a.py').unlink()
  (box / 'a.py').symlink_to(box.parent / 'outside')


def _replace_by_link_within(box):
  (box / 'a.py').rename(box.parent / 'kept')
  (box / 'a.py').symlink_to('../kept')


def _replace_by_folder(box):
  (box / 'a.py').unlink()
  (box / 'a.py').mkdir()


def _replace_by_pipe(box):
  (box / 'a.py').unlink()
  os.mkfifo(box / 'a.py')


def _replace_by_loop(box):
  (box / 'a.py').unlink()
  (box / 'a.py').symlink_to('a.py')


def _replace_by_terabyte(box):
  with open(box / 'a.py', 'r+b') as file:
    file.truncate(1 << 40)


def _add_many_files(box):
  for i in range(500):
    (box / f'x{i}').touch()


def _add_deep_tree(box):
  os.makedirs(box.joinpath(*['d'] * 400))


def _add_link(box):
  (box / 'extra').symlink_to('/')


@pytest.mark.parametrize(
  'attack',
  [
    _replace_by_link,
    _replace_by_link_within,
    _replace_by_folder,
    _replace_by_pipe,
    _replace_by_loop,
    _replace_by_terabyte,
    _add_many_files,
    _add_deep_tree,
    _add_link,
  ],
  ids=lambda attack: attack.__name__.strip('_'),
)
def test_hostile_workspace_is_a_quick_failure(box, attack):
  """Links are not followed, pipes not waited for, huge files not read (law 9)."""
  attack(box)
  expected = verify.Expected(FILES)
  started = time.monotonic()
  assert expected(box, 'done') == 0.0
  assert time.monotonic() - started < 30


def test_missing_workspace_is_not_the_agents_failure(tmp_path):
  """An infrastructure failure is never a reward of 0 (law 5)."""
  with pytest.raises(OSError):
    verify.Expected(FILES)(tmp_path / 'gone', 'done')


def test_shutting_the_verifier_out_is_a_failure(box):
  """Otherwise an agent would learn to have its failures masked."""
  for path in (box / 'a.py', box):
    path.chmod(0)
    verdict = verify.Expected(FILES)(box, 'done')
    path.chmod(0o755)
    assert verdict == (1.0 if os.geteuid() == 0 else 0.0)


@pytest.fixture
def no_garbage():
  """Nothing of other tests, such as their sockets, is collected during a test."""
  gc.freeze()
  yield
  gc.unfreeze()


def test_no_descriptor_leaks(box, no_garbage):
  """A job judges a hundred thousand workspaces in one process."""
  before = len(os.listdir('/proc/self/fd'))
  for attack in (lambda _: None, _replace_by_link, _replace_by_folder):
    attack(box)
    verify.Expected(FILES)(box, 'done')
  assert len(os.listdir('/proc/self/fd')) == before


@pytest.mark.parametrize(
  ('said', 'meant'),
  [
    (' 12\n', '12'),
    ('12.', '12'),
    ('`a.py`', 'a.py'),
    ('"a.py".', 'a.py'),
    ("'a.py.'", 'a.py'),
    ('./a.py', 'a.py'),
    ('A.py', 'A.py'),
    ('1 2', '1 2'),
    ('', ''),
    ('.', ''),
    ('"', '"'),
  ],
)
def test_answers_are_normalised_as_documented(said, meant):
  """Only listed differences are ignored; case and inner text are significant."""
  assert verify.normalize_answer(said) == meant
