"""Task directories from elsewhere read and write nothing beyond the task, and get no
more than the job allows; every fault is one line that names file and field."""

from __future__ import annotations

import dataclasses
import gzip
import os
import shutil

import pytest

from m2jax import tasks
from m2jax.tasks import harbor
from m2jax.tasks.harbor import compose, directory, verifier

# A task of Harbor's own, with a field that this code does not know.
STANDARD = """\
version = "1.0"
[metadata]
author_name = "x"
[verifier]
timeout_sec = 120.0
new_field = "x"
[agent]
timeout_sec = 120.0
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
"""
OURS = '[metadata.m2jax]\npipeline = "x"\nfamily = "f"\n'


@pytest.fixture
def task(tmp_path):
  """A function that writes a task with further lines of its task.toml."""
  path = tmp_path / 'data' / 'tasks' / 'train' / 'a'

  def make(toml=''):
    for folder in ('tests', 'environment/overlay', 'solution'):
      (path / folder).mkdir(parents=True, exist_ok=True)
    (path / 'task.toml').write_text(OURS + toml)
    (path / 'instruction.md').write_text('do it')
    (path / 'tests' / 'test.sh').write_text('exit 0')
    return path

  return make


FAULTS = {
  'evil = 1': 'metadata.m2jax has no field .evil.',
  'collect = "*"': 'metadata.m2jax.collect is .*list of texts',
  'collect = [1]': 'metadata.m2jax.collect',
  'remove = [1]': 'metadata.m2jax.remove',
  'remove = ["a/../../b"]': 'metadata.m2jax.remove has .*relative path',
  'listing = 1': 'metadata.m2jax.listing',
  'details = 1': 'metadata.m2jax.details',
  'answer = "../../x"': 'metadata.m2jax.answer',
  'answer = "/x"': 'metadata.m2jax.answer',
  'answer = "a/"': 'metadata.m2jax.answer',
  'answer = "a\\u0000"': 'metadata.m2jax.answer',
  'site = "../../../etc"': 'metadata.m2jax.site',
  'verifier_site = "/etc"': 'metadata.m2jax.verifier_site',
  'max_tool_calls = 1001': 'max_tool_calls is 1001, above 1000.*ceilings.tool_calls',
  'max_tool_calls = -1': 'max_tool_calls',
  'max_tool_calls = 100000000000000000000': 'max_tool_calls.*64 bits',
  'max_tool_calls = true': 'max_tool_calls',
  'verifier_needs = [1]': 'verifier_needs',
  'verifier_needs = {evil = 1}': 'verifier_needs has no field .evil.',
  'verifier_needs = {wall_s = 1}': 'verifier_needs has no field .wall_s.',
  'verifier_needs = {memory_bytes = "x"}': 'verifier_needs.memory_bytes',
  'verifier_needs = {workspace_bytes = 1000000000000}': 'ceilings.workspace_bytes',
  'details = {x = [0.0, inf]}': r'metadata.m2jax.details.x\[1\]: inf',
  f'details.x = {"[" * 200}{"]" * 200}': 'metadata.m2jax.details.x.*nested more than',
  f'details.x = {"[" * 3000}{"]" * 3000}': 'task.toml: nested too deep',
  f'details.x = "{"x" * 70_000}"': 'task.toml: more than 65536 bytes',
  '[verifier]\ntimeout_sec = nan': 'verifier.timeout_sec: nan',
  '[verifier]\ntimeout_sec = inf': 'verifier.timeout_sec: inf',
  '[verifier]\ntimeout_sec = -1': 'verifier.timeout_sec is -1',
  '[verifier]\ntimeout_sec = "60"': 'verifier.timeout_sec',
  '[verifier]\ntimeout_sec = 1e9': 'verifier.timeout_sec .*ceilings.wall_s',
  '[agent]\ntimeout_sec = 0': 'agent.timeout_sec',
  '[environment]\nmemory_mb = "2G"': 'environment.memory_mb',
  '[[environment]]': 'environment is .*table',
}


@pytest.mark.parametrize('line', FAULTS, ids=lambda line: line[:40])
def test_faults_of_a_task_toml_are_named(task, line):
  path = task(f'{line}\n')
  with pytest.raises(harbor.BadTask, match=FAULTS[line]) as fault:
    harbor.read(path)
  assert str(path / 'task.toml') in str(fault.value) and '\n' not in str(fault.value)


@pytest.mark.parametrize(
  'toml', ['metadata = 1', '[metadata]\nm2jax = 1', OURS[:30], 'x = ', '\xff']
)
def test_what_is_no_task_toml(task, toml):
  path = task()
  (path / 'task.toml').write_bytes(toml.encode('latin-1'))
  with pytest.raises(harbor.BadTask, match=r'task\.toml: '):
    harbor.read(path)


def test_standard_fields_are_accepted(task):
  """Whatever Harbor adds to its own tables."""
  path = task()
  (path / 'task.toml').write_text(STANDARD + OURS)
  assert harbor.read(path).verifier_s == 120.0


def test_the_job_sets_the_ceilings(task):
  """They reach every process that makes the task, since its spec has them."""
  path = task('max_tool_calls = 60\n[verifier]\ntimeout_sec = 7200\n')
  dataset = str(path.parents[2])
  with pytest.raises(harbor.BadTask, match='wall_s'):
    tasks.families(harbor.Config(dataset=dataset))
  high = dataclasses.replace(harbor.Ceilings(), wall_s=7200.0)
  config = harbor.Config(dataset=dataset, ceilings=high)
  spec = tasks.spec(config, 'train', 0)
  assert tasks.make(spec).directory.verifier_s == 7200.0
  low = dataclasses.replace(high, tool_calls=50)
  with pytest.raises(harbor.BadTask, match=r'max_tool_calls.*60, above 50'):
    tasks.spec(dataclasses.replace(config, ceilings=low), 'train', 0)
  with pytest.raises(ValueError, match='no ceilings of Harbor tasks'):
    tasks.make(spec.replace('wall_s', 'evil'))


def test_sizes_are_bounded(task):
  """Sparse files take no space in a dataset, but memory when they are read."""
  path = task()
  for name in ('instruction.md', 'tests/big', 'environment/overlay/big'):
    (path / name).touch()
    before = (path / name).stat().st_size
    os.truncate(path / name, 6 << 30)
    with pytest.raises(harbor.BadTask, match=f'{name}: .*{directory.MAX_BYTES} bytes'):
      harbor.read(path)
    os.truncate(path / name, before)
  os.truncate(path / 'instruction.md', 2 << 20)
  with pytest.raises(harbor.BadTask, match=r'instruction\.md: more than'):
    harbor.read(path)


def test_entries_are_bounded(task):
  path = task()
  (path / '/'.join(['tests', *'d' * 70])).mkdir(parents=True)
  with pytest.raises(harbor.BadTask, match='levels'):
    harbor.read(path)


def test_a_bad_archive_is_named(task, monkeypatch):
  monkeypatch.setattr(compose, 'MAX_UNPACKED_BYTES', 1 << 20)
  path = task()
  found = harbor.read(path)
  bomb = gzip.compress(bytes(compose.MAX_UNPACKED_BYTES + 1))
  for data in (bomb, bomb[:-9], b'x'):
    (path / 'environment' / directory.ARCHIVE).write_bytes(data)
    with pytest.raises(harbor.BadTask, match=r'environment/workspace\.tar\.gz: '):
      found.workspace()


LINKS = (
  'instruction.md',
  'environment',
  'environment/overlay/x',
  'tests/x',
  'solution',
)


@pytest.mark.parametrize('where', [*LINKS, '.'])
def test_links_are_refused(task, tmp_path, where):
  """Also one that appears after the task was read."""
  path, outside = task(), tmp_path / 'outside'
  outside.mkdir()
  (outside / 'file').write_text('secret')
  found, entry = harbor.read(path), path / where
  shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
  entry.symlink_to(outside if '.' not in where or where == '.' else outside / 'file')
  for read in (lambda: harbor.read(path), found.tests, found.workspace, found.setup):
    with pytest.raises(harbor.BadTask, match='a link|not a task directory'):
      read()


def test_pipes_are_refused(task):
  """Reading one would wait for ever. The error is one line, whatever its name."""
  path = task()
  os.mkfifo(path / 'tests' / '\x1b[2J\n')
  with pytest.raises(harbor.BadTask, match=r'tests/\\x1b\[2J\\n: .*pipe'):
    harbor.read(path)


@pytest.mark.parametrize('name', ['a@b', 'a?{}', '\x1b[2J', 'é'])
def test_names_of_tasks_fit_their_specs(task, name):
  path = task()
  path.rename(path.with_name(name))
  with pytest.raises(harbor.BadTask, match='the name of a task is'):
    tasks.families(harbor.Config(dataset=str(path.parents[2])))


def test_sites_are_in_the_dataset(task, tmp_path):
  """Sandboxes see what is there, so it is no link; nor does a pipe stop the job."""
  dataset = task().parents[2]
  sites = dataset / 'sites'
  sites.mkdir()
  os.mkfifo(sites / 'x.zip')
  assert verifier._copies(str(sites), ('absent',), 0) == ()
  shutil.rmtree(sites)
  sites.symlink_to(tmp_path)
  with pytest.raises(harbor.BadTask, match='sites: a link'):
    verifier.host(dataset)


@pytest.mark.parametrize('path', ['/x', '../x', 'a/../../x', 'a/', 'a//b', './a', ''])
def test_paths_that_lead_out_are_not_written(tmp_path, path):
  """Whatever named them; and looking for conflicts ends."""
  files = {path: b'', 'good': b''}
  assert list(compose.conflicts(files)) == []
  with pytest.raises(ValueError, match='leads out'):
    compose.write(files, tmp_path / 'new')
  assert not (tmp_path / 'new').exists()
