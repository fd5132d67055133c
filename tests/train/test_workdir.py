"""A workdir holds one run: its settings, its tokenizer, and no other's."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from m2jax.text import tokenizer
from m2jax.train import workdir


@dataclasses.dataclass(frozen=True)
class Inner:
  sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Config:
  seed: int = 0
  inner: Inner = Inner()


def test_same_settings_go_on(tmp_path):
  """Tuples come back from JSON as lists: that is no difference."""
  run = tmp_path / 'run'
  workdir.open_workdir(Config(), run)
  (run / 'metrics.jsonl').write_text('kept')
  workdir.open_workdir(Config(), run)
  assert (run / 'metrics.jsonl').read_text() == 'kept'


def test_other_settings_are_named(tmp_path):
  """The person must see which setting differs, and what it was."""
  workdir.open_workdir(Config(), tmp_path)
  (tmp_path / 'metrics.jsonl').touch()
  other = Config(inner=Inner((1, 3)))
  with pytest.raises(
    workdir.OtherRun, match=r'inner\.sizes: there \[1, 2\], now \[1, 3'
  ):
    workdir.open_workdir(other, tmp_path)
  workdir.open_workdir(other, tmp_path, fresh=True)
  assert not (tmp_path / 'metrics.jsonl').exists()
  assert json.loads((tmp_path / 'config.json').read_text())['inner']['sizes'] == [1, 3]


_HOLD = """
import pathlib, sys, time
from m2jax.train import workdir
from tests.train.test_workdir import Config
workdir.open_workdir(Config(), pathlib.Path(sys.argv[1]))
if sys.argv[2:]:
  import os
  if os.fork() == 0:  # a child that outlives the run, as a stray worker might
    time.sleep(60)
print('held', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize('children', [(), ('fork',)])
def test_one_process_at_a_time(tmp_path, children):
  """A second process is refused by name, also with `fresh`; once the first was killed
  the run goes on, whatever its children do."""
  command = [sys.executable, '-c', _HOLD, str(tmp_path / 'run'), *children]
  holder = subprocess.Popen(
    command, stdout=subprocess.PIPE, text=True, start_new_session=True
  )
  try:
    assert holder.stdout.readline() == 'held\n'
    for fresh in (False, True):
      with pytest.raises(workdir.OtherRun, match=f'process {holder.pid} on '):
        workdir.open_workdir(Config(), tmp_path / 'run', fresh)
    workdir.open_workdir(Config(), tmp_path / 'run', leads=False)  # another of its job
    holder.kill()
    holder.wait()
    workdir.open_workdir(Config(), tmp_path / 'run')
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()


def test_a_workdir_that_cannot_be_made_is_named(tmp_path):
  """One line with the flag and the reason."""
  (tmp_path / 'file').touch()
  with pytest.raises(workdir.UnusableWorkdir, match='--workdir=.*file/run: Not a dir'):
    workdir.open_workdir(Config(), tmp_path / 'file' / 'run')


def test_a_failed_start_claims_nothing(tmp_path):
  """A run that left only its settings gives way to the corrected command."""
  workdir.open_workdir(Config(seed=1), tmp_path)
  workdir.open_workdir(Config(seed=2), tmp_path)
  assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 2


def test_fresh_spares_what_is_no_run(tmp_path):
  """--fresh with a mistyped path must not delete a person's files."""
  (tmp_path / 'thesis.txt').write_text('years of work')
  workdir.open_workdir(Config(), tmp_path, fresh=True)
  assert (tmp_path / 'thesis.txt').exists()
  (tmp_path / 'config.json').write_text('{"architectures": ["M2"]}')  # a model's
  with pytest.raises(workdir.OtherRun, match='not written by a run'):
    workdir.open_workdir(Config(), tmp_path, fresh=True)
  assert (tmp_path / 'thesis.txt').exists()


def test_tokenizer_is_made_once(tmp_path):
  """A second start must read the run's tokenizer: another one would shift every id."""
  path = tmp_path / 'tokenizer.json'
  first = workdir.keep_tokenizer(path, lambda: tokenizer.train(['a b'], 300), 300)
  again = workdir.keep_tokenizer(path, lambda: pytest.fail('made again'), 300)
  assert again.encode('a b') == first.encode('a b')
  with pytest.raises(ValueError, match='300 tokens, more than'):
    workdir.keep_tokenizer(path, lambda: pytest.fail('made again'), 299)
