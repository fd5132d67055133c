"""Harbor directories: round trip, and verification out of the agent's reach."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
import zipfile

import pytest

from m2jax import sandbox, tasks
from m2jax.tasks import demonstrations, harbor
from m2jax.tasks.harbor import compose, verifier

_TEST = """\
grep -q right "$M2JAX_TREE/work/out.txt" && [ "$(cat "$M2JAX_TREE/tests/t")" = t ] \
  && r=1 || r=0
echo $r > "$M2JAX_LOGS/reward.txt"
"""


def _draft(tmp_path, test=_TEST, verifier_s=5.0, **metadata):
  archive = tmp_path / 'base.tar.gz'
  with tarfile.open(archive, 'w:gz') as tar:
    texts = {'work/in.txt': 'in', 'work/kept.pyc': '', 'tests/t': 't', 'secret': 's'}
    for name, text in texts.items():
      info = tarfile.TarInfo(name)
      info.size = len(text)
      tar.addfile(info, io.BytesIO(text.encode()))
  return harbor.Draft(
    name='one',
    instruction='Write right into work/out.txt.',
    metadata=harbor.Metadata(
      **{
        'pipeline': 'test',
        'family': 'files',
        'collect': ('work/*',),
        'exclude': ('*.pyc',),
        'remove': ('secret',),
        **metadata,
      }
    ),
    archive=archive,
    overlay={'work/extra.txt': b'more'},
    tests={'test.sh': test.encode()},
    solution={'solve.sh': b'echo right > "$M2JAX_WORKSPACE/work/out.txt"\n'},
    verifier_s=verifier_s,
  )


def _dataset(tmp_path, **more):
  split = tmp_path / 'data' / 'tasks' / 'train'
  split.mkdir(parents=True)
  return harbor.write(_draft(tmp_path, **more), split)


def _judge(path, *commands, answer=''):
  """The verdict after an agent's commands."""

  async def work():
    task = harbor.of_directory(harbor.read(path))
    limits = sandbox.Limits(wall_s=5.0)
    try:
      async with task.open(backend='namespaces', limits=limits) as environment:
        for command in commands:
          await environment.execute('sh', {'cmd': command})
        return await task.judge(environment, answer)
    finally:
      await sandbox.shutdown()

  return asyncio.run(work())


def test_what_is_written_is_read(tmp_path):
  path = _dataset(tmp_path)
  found = harbor.read(path)
  assert found.metadata == _draft(tmp_path).metadata
  assert found.workspace() == {
    'work/in.txt': b'in',
    'work/kept.pyc': b'',
    'tests/t': b't',
    'work/extra.txt': b'more',
  }
  assert found.verifier_s == 5.0


def test_harbor_itself_accepts_it(tmp_path):
  """With the package `harbor` (Python 3.12 and later) as the judge."""
  task = pytest.importorskip('harbor.models.task.task', reason='needs harbor')
  path = _dataset(tmp_path)
  found = task.Task(path)
  assert found.config.metadata['m2jax']['pipeline'] == 'test'
  assert task.Task.is_valid_dir(path)


def test_the_work_is_judged(tmp_path):
  path = _dataset(tmp_path)
  assert _judge(path, 'echo right > work/out.txt').outcome == harbor.PASSED
  assert _judge(path, 'echo wrong > work/out.txt').outcome == harbor.FAILED


@pytest.mark.parametrize(
  'command',
  [
    'echo x > tests/t; rm -f tests/t',  # irrelevant changes of tests are ignored
    'mkfifo work/pipe; ln -s /etc/passwd work/link; mkdir -p work/a/b',
    'ln -s /dev/zero work/zero; chmod 000 tests',
  ],
)
def test_other_files_of_the_agent_are_ignored(tmp_path, command):
  path = _dataset(tmp_path)
  verdict = _judge(path, f'echo right > work/out.txt; {command}')
  assert verdict.outcome == harbor.PASSED, verdict


def test_a_link_is_not_work(tmp_path):
  path = _dataset(tmp_path)
  made = 'echo right > x; ln -s ../x work/out.txt'
  assert _judge(path, made).outcome == harbor.FAILED


def test_too_much_work_fails(tmp_path, monkeypatch):
  monkeypatch.setattr(compose, 'MAX_FILES', 10)
  path = _dataset(tmp_path)
  verdict = _judge(path, 'for i in {1..20}; do echo right > work/$i; done')
  assert verdict.outcome == harbor.FAILED and 'more than' in verdict.reason


# Python, since a shell's path is limited to PATH_MAX at once.
_DEEP = """\
python3 - <<'END'
import os
os.chdir('work')
for _ in range(2000):
  os.mkdir('d' * 50)
  os.chdir('d' * 50)
open('out.txt', 'w').write('right')
END
"""
UNJUDGEABLE = {
  'directories thousands of levels deep': _DEEP,
  'a path that the system does not take': _DEEP.replace('2000', '60'),
  'a directory where a file of the task is': 'mkdir -p tests work/kept.pyc; '
  'echo right > work/out.txt; rm -rf work/kept.pyc; mkdir work/kept.pyc; '
  'echo right > work/kept.pyc/out.txt',
  'no permission to read the workspace': 'chmod 000 .',
}


@pytest.mark.parametrize('name', UNJUDGEABLE)
def test_what_only_the_agent_can_have_caused_is_a_failure(tmp_path, name):
  """An attempt that is masked costs nothing: no state may turn a failure into that."""
  path = _dataset(tmp_path)
  found = _judge(path, UNJUDGEABLE[name])
  assert found.outcome == harbor.FAILED, found


def test_a_directory_where_a_hidden_input_is_is_a_failure(tmp_path):
  run = dict(run='cat work/input.txt', collect=('*',))
  path = _dataset(tmp_path, **run)
  (path / 'tests' / 'inputs' / '0' / 'work').mkdir(parents=True)
  (path / 'tests' / 'inputs' / '0' / 'work' / 'input.txt').write_text('1')
  found = _judge(path, 'mkdir work/input.txt; echo right > work/input.txt/out.txt')
  assert found.outcome == harbor.FAILED, found


@pytest.mark.parametrize(
  'test',
  [
    'exit 1',
    ':',
    'echo nan > "$M2JAX_LOGS/reward.txt"',
    'echo 2 > "$M2JAX_LOGS/reward.txt"',
    'echo no > "$M2JAX_LOGS/reward.txt"',
    'ln -s /etc/passwd "$M2JAX_LOGS/reward.txt"',
    'echo 1 > "$M2JAX_LOGS/reward.txt"; exit 1',
    'echo 1 > "$M2JAX_LOGS/reward.txt"; echo "{}]" > "$M2JAX_LOGS/details.json"',
    'echo \'{"invalid": "no engine"}\' > "$M2JAX_LOGS/details.json"',
    f'echo "{verifier.READY}"; echo \'{{"invalid": "two answers"}}\' '
    '> "$M2JAX_LOGS/details.json"',
  ],
)
def test_a_verifier_that_cannot_decide_is_invalid(tmp_path, test):
  """Never a reward of 0: the attempt is masked (law 5)."""
  path = _dataset(tmp_path, test=test)
  verdict = _judge(path, 'echo right > work/out.txt')
  assert verdict.outcome == harbor.INVALID, verdict


def test_a_verifier_that_takes_too_long_is_invalid(tmp_path):
  path = _dataset(tmp_path, test='sleep 60', verifier_s=0.5)
  assert _judge(path, 'echo right > work/out.txt').outcome == harbor.INVALID


def test_after_ready_no_reward_is_a_failure(tmp_path):
  """The agent's code ran then: masking would reward a crash."""
  path = _dataset(tmp_path, test=f'echo "{verifier.READY}"; exit 9')
  assert _judge(path).outcome == harbor.FAILED


class _Box:
  """What test.sh left in its logs."""

  def __init__(self, name='reward.txt', text='1\n'):
    self.name, self.text = name, text

  async def read(self, path, limit):
    if path.endswith(self.name):
      return self.text.encode()
    raise FileNotFoundError(path)


@pytest.mark.parametrize(
  'text, reward',
  [
    ('{"reward": 1}', 1),
    ('{"reward": 0.25, "style": 1}', 0.25),
    ('{"accuracy": 0.5}', 0.5),
    ('{"accuracy": 0.5, "style": 1}', None),
    ('{"reward": true}', None),
    ('{"reward": NaN}', None),
    ('{"reward": 2}', None),
    ('{"reward": 1' + '0' * 400 + '}', None),
    ('[' * 100_000, None),
    ('[1]', None),
    ('{}', None),
    ('{', None),
  ],
)
def test_a_reward_in_json(text, reward):
  """Harbor's own verifiers may write reward.json alone. After the line of ours it does
  not count: code under test could have written it."""
  for output, outcome in (('', 'invalid'), (f'{verifier.READY}\n', 'failed')):
    result = sandbox.ExecResult(0, output, '', wall_s=1.0)
    found = asyncio.run(verifier.verdict(_Box('reward.json', text), result))
    if reward is None or output:
      assert (found.outcome, found.reward) == (outcome, 0)
    else:
      assert found.reward == reward
      assert found.outcome == ('passed' if reward == 1 else 'failed')


@pytest.mark.parametrize(
  'output, outcome', [(f'{verifier.READY}\n', 'passed'), ('', 'invalid')]
)
def test_a_reward_counts_although_a_process_had_no_memory(output, outcome):
  """If the verifier, which had begun to judge, went on to its end: it has decided."""
  result = sandbox.ExecResult(0, output, '', wall_s=1.0, oom=True)
  assert asyncio.run(verifier.verdict(_Box(), result)).outcome == outcome


def test_nothing_of_the_verifier_can_be_written(tmp_path):
  test = 'cd "$M2JAX_TESTS"; (echo x > x || echo x >> test.sh || rm -f "$M2JAX_TREE/"*)'
  path = _dataset(
    tmp_path, test=test + ' 2>/dev/null; echo $? > "$M2JAX_LOGS/reward.txt"'
  )
  assert _judge(path).outcome == harbor.PASSED  # 1: the last failed


def test_the_answer_is_part_of_the_tree(tmp_path):
  test = (
    'grep -q 42 "$M2JAX_TREE/answer" && r=1 || r=0; echo $r > "$M2JAX_LOGS/reward.txt"'
  )
  path = _dataset(tmp_path, test=test, answer='answer')
  assert _judge(path, answer='It is 42').outcome == harbor.PASSED
  assert _judge(path, answer='It is 43').outcome == harbor.FAILED


def test_it_is_a_kind_of_tasks(tmp_path):
  """Through the protocol alone, as agents, curriculum and evaluation use it."""
  _dataset(tmp_path)
  config = harbor.Config(dataset=str(tmp_path / 'data'))
  assert tasks.families(config) == {'files': 1.0}
  spec = tasks.spec(config, 'train', 3, seed=1)
  task = tasks.make(spec)
  assert task.spec == spec and task.instruction.startswith('Write right')
  with pytest.raises(ValueError, match='no task'):
    tasks.spec(config, 'dev', 0)


@pytest.mark.parametrize('missing', ['task.toml', 'instruction.md', 'tests/test.sh'])
def test_a_broken_directory_is_named(tmp_path, missing):
  path = _dataset(tmp_path)
  (path / missing).unlink()
  with pytest.raises(harbor.BadTask, match=missing):
    harbor.read(path)


def _bomb(kind):
  if kind == 'zeros':
    return gzip.compress(bytes(compose.MAX_UNPACKED_BYTES + 1))
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode='w:gz') as tar:
    if kind == 'entries':
      for number in range(compose.MAX_ENTRIES + 1):
        tar.addfile(tarfile.TarInfo(str(number)))
    if kind == 'sparse':
      entry = tarfile.TarInfo('x')
      entry.pax_headers = {
        'GNU.sparse.map': '0,1',
        'GNU.sparse.size': str(1 << 40),
        'GNU.sparse.numblocks': '1',
      }
      tar.addfile(entry)
  return buffer.getvalue()[:-9] if kind == 'cut off' else buffer.getvalue()


@pytest.mark.parametrize('kind', ['zeros', 'entries', 'sparse', 'cut off'])
def test_an_archive_is_unpacked_within_bounds(kind, monkeypatch):
  monkeypatch.setattr(compose, 'MAX_UNPACKED_BYTES', 1 << 20)
  monkeypatch.setattr(compose, 'MAX_ENTRIES', 1 << 10)
  with pytest.raises(compose.BadArchive):
    compose.unpack(_bomb(kind))


def _demonstrate(path):
  spec = f'harbor/train/{path.name}@{path.parents[2]}'
  options = dict(backend='namespaces', limits=sandbox.Limits(wall_s=5.0))
  teacher = harbor.TeacherConfig()

  async def work():
    try:
      return await demonstrations.collect([spec], teacher, **options)
    finally:
      await sandbox.shutdown()

  return asyncio.run(work())


def test_the_teacher_shows_the_solution(tmp_path):
  """One real call, which the task's own verifier accepts."""
  (demo,) = _demonstrate(_dataset(tmp_path))
  assert demo.success == 1.0
  (call,) = [c for m in demo.messages for c in m.get('tool_calls', ())]
  assert 'echo right' in call['function']['arguments']


def test_solutions_that_no_call_shows_are_named(tmp_path):
  path = _dataset(tmp_path)
  (path / 'solution' / 'gold.patch').write_text('x')
  harbor.make.cache_clear()
  with pytest.raises(ValueError, match=r'gold\.patch.*sft\.recorded'):
    _demonstrate(path)


def test_a_task_that_is_proved_has_the_sites_of_its_dataset(tmp_path):
  metadata = harbor.Metadata('toy', 'toy')
  for split in (harbor.STAGING, 'train'):
    path = tmp_path / 'tasks' / split / 'a'
    assert harbor.Directory(path, '', metadata, 1.0).dataset == tmp_path
  assert harbor.Directory(tmp_path / 'a', '', metadata, 1.0).dataset == tmp_path


def test_copies_of_a_module_are_found_wherever_they_are(tmp_path):
  """As a package, a module, compiled, or in an archive; nothing else is hidden."""
  vendored = tmp_path / 'tool' / '_vendor'
  package, single = vendored / 'calc', tmp_path / 'calc.py'
  for folder in (package / 'inner', vendored / 'calculus', tmp_path / 'doc' / 'calc'):
    folder.mkdir(parents=True)
  (package / 'core.py').write_text('')
  (package / 'inner' / 'calc.py').write_text('')  # hidden with its folder
  (vendored / 'calculus' / 'core.py').write_text('')
  (tmp_path / 'doc' / 'calc' / 'index.html').write_text('')
  single.write_text('')
  (tmp_path / 'calc.cpython-313.pyc').write_bytes(b'')
  for name, inside in (('a.whl', 'x/calc/core.py'), ('b.zip', 'x/calculus.py')):
    with zipfile.ZipFile(tmp_path / name, 'w') as archive:
      archive.writestr(inside, '')
  (tmp_path / 'c.zip').write_bytes(b'no archive')
  (tmp_path / 'link').mkdir()
  (tmp_path / 'link' / 'calc').symlink_to(package)
  (tmp_path / 'link' / 'calc.py').symlink_to(single)
  found = verifier._copies(str(tmp_path), ('calc',), 0)
  assert sorted(found) == [
    *('a.whl', 'calc.cpython-313.pyc', 'calc.py', 'tool/_vendor/calc/'),
  ]
  found = verifier._copies(str(tmp_path), ('_vendor.calc', 'x.calc', 'calc.core'), 0)
  assert sorted(found) == ['a.whl', 'tool/_vendor/calc/']  # submodules
  host = sandbox.Host()
  assert verifier.without(host, ()) == host
  assert verifier.without(host, ('json',)) == host  # of the interpreter itself
