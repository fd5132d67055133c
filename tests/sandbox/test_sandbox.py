"""What a well-meaning user of the sandbox relies on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from m2jax import sandbox
from m2jax.sandbox import api, client, seccomp, temporary, unavailable

_ROOT = os.geteuid() == 0


@pytest.mark.smoke
def test_commands_see_files_and_leave_files(run, make):
  """The basic contract: files in, output and exit code, files out."""
  box = make(contents={'f': b'a\nb\n', 'd/g': b'x'})
  assert run(box.exec('wc -l f; cat d/g')).stdout == '2 f\nx'
  result = run(box.exec('echo made > h; echo oops >&2; exit 3'))
  assert (result.returncode, result.stdout, result.stderr) == (3, '', 'oops\n')
  assert run(box.read('h')) == b'made\n'
  assert run(box.read('/workspace/h')) == b'made\n'
  assert (box.workspace / 'h').read_bytes() == b'made\n'


def test_workspace_persists_and_the_rest_does_not(run, make):
  """Only the workspace connects commands: no file, process or variable outlasts one."""
  box = make()
  run(box.exec('cd /tmp; touch scratch ~/kept; export X=1; sleep 60 &'))
  result = run(box.exec('ls /tmp; ls; echo "[$X]"; echo /proc/[0-9]*'))
  kept, variable, *processes = result.stdout.split()
  assert (kept, variable, len(processes)) == ('kept', '[]', 2)  # init, bash


def test_directory_is_copied_in(run, make, tmp_path):
  """A workspace directory is a starting point: it is never changed."""
  (tmp_path / 'd').mkdir()
  (tmp_path / 'd' / 'run').write_text('#!/bin/sh\necho ran\n')
  (tmp_path / 'd' / 'run').chmod(0o755)
  box = make(workspace=tmp_path)
  assert run(box.exec('d/run; rm -r d')).stdout == 'ran\n'
  assert (tmp_path / 'd' / 'run').exists()


@pytest.mark.parametrize(
  'command, words',
  [('echo \0', 'NUL'), ('true ' + 'x' * 200_000, 'longer'), ('nosuch', 'not found')],
)
def test_odd_commands_fail_as_commands(run, make, command, words):
  """What a model may write, NUL bytes included, is its own failure, not ours."""
  result = run(make().exec(command))
  assert result.returncode in (126, 127)
  assert words in result.stderr


def test_undecodable_text_both_ways(run, make):
  """Byte-level tokenizers make lone surrogates, commands print any bytes."""
  box = make()
  assert run(box.exec('echo \ud800')).stdout == '?\n'
  assert run(box.exec(r"printf 'a\xffb'")).stdout == 'a\ufffdb'


def test_signals_are_reported_as_a_shell_does(run, make):
  """An agent reads 139 or 143 as in any shell; SIGPIPE works as usual."""
  box = make()
  assert run(box.exec('kill -TERM $$')).returncode == 143
  assert run(box.exec('yes | head -1; echo ${PIPESTATUS[0]}')).stdout == 'y\n141\n'


def test_environment_is_minimal(run, make, monkeypatch):
  """Keys and tokens in the caller's environment must not reach a command."""
  monkeypatch.setenv('SECRET_TOKEN', 'hush')
  box = make(env={'GIVEN': 'yes'})
  names = {line.split('=')[0] for line in run(box.exec('env')).stdout.splitlines()}
  assert 'GIVEN' in names
  given = {'PATH', 'HOME', 'LANG', 'TERM', 'USER', 'GIVEN'}
  assert names <= given | {'PWD', 'SHLVL', '_', 'OLDPWD'}


def test_python_is_there(run, make):
  """Tasks have scripts to repair: commands get a python3."""
  result = run(make().exec('python3 -c "print(6 * 7)"'))
  assert result.stdout == '42\n', result.stderr


def test_snapshot_and_restore(run, make):
  """Branching a rollout needs the exact workspace back, modes and links included."""
  box = make(contents={'d/f': b'1'})
  run(box.exec('chmod 750 d; chmod 600 d/f; ln -s d/f link; mkdir -m 500 locked'))
  before = run(box.exec('ls -lR --time-style=+ . | grep -v total; cat link'))
  snapshot = run(box.snapshot())
  run(box.exec('rm -rf d link; mkdir -p x/y; chmod 000 x; echo 2 > new'))
  run(box.restore(snapshot))
  after = run(box.exec('ls -lR --time-style=+ . | grep -v total; cat link'))
  assert after.stdout == before.stdout
  assert run(box.exec('echo 3 > d/f')).returncode == 0  # still the agent's own


def test_many_at_once_do_not_meet(run, make):
  """32 sandboxes at once: none sees another's files; as root, each has its own uid."""
  boxes = [make(contents={'id': str(i).encode()}) for i in range(32)]

  async def use():
    runs = (box.exec('cat id; ls | wc -l; touch mine') for box in boxes)
    return await asyncio.gather(*runs)

  results = run(use())
  assert [r.stdout for r in results] == [f'{i}1\n' for i in range(32)]
  owners = {(box.workspace / 'mine').stat().st_uid for box in boxes}
  assert 0 not in owners
  assert len(owners) == (32 if _ROOT else 1)


@pytest.mark.skipif(not _ROOT, reason='sandboxes have no uids of their own')
def test_supervisors_share_no_uid(run, make):
  """The end of a sandbox kills what runs under its uid: a command of another supervisor
  with the same range goes on."""
  uids = (400_000, 400_128)  # two blocks
  one, other = (sandbox.Host(uids=uids, parallel_execs=n) for n in (30, 31))

  async def use():
    async with await sandbox.create(host=one) as box:
      running = asyncio.ensure_future(box.exec('touch mine; sleep 2; echo done'))
      async with contextlib.AsyncExitStack() as others:
        for _ in range(64):
          await others.enter_async_context(await sandbox.create(host=other))
        with pytest.raises(sandbox.SandboxError, match='all uids .* are in use'):
          await sandbox.create(host=other)
      return await running

  assert run(use()).stdout == 'done\n'


@pytest.mark.skipif(not _ROOT, reason='only root has uids to give')
def test_uids_are_held_where_only_root_can(monkeypatch, tmp_path):
  """No other account can keep root's sandboxes from starting."""
  monkeypatch.syspath_prepend(client._SCRIPT)
  uids = importlib.import_module('uids')
  monkeypatch.setattr(uids, '_DIRECTORY', str(tmp_path / 'held'))
  assert uids.Uids(1000, 1064).take() in range(1000, 1064)
  (tmp_path / 'held').chmod(0o777)
  with pytest.raises(OSError, match="root's own directory"):
    uids.Uids(1000, 1064).take()


def test_commands_of_one_sandbox_queue(run, make):
  """Tool calls of one agent never overlap, so read() never races a command."""
  box = make()

  async def both():
    await asyncio.gather(
      box.exec('echo a >> log; sleep 0.2; echo b >> log'), box.exec('echo c >> log')
    )
    return await box.read('log')

  assert run(both()) == b'a\nb\nc\n'


def test_parallel_execs_bounds_what_runs(run, make):
  """More commands than the bound wait their turn, with their clocks stopped."""
  host = sandbox.Host(parallel_execs=1)
  boxes = [make(host=host) for _ in range(3)]

  async def use():
    return await asyncio.gather(*(box.exec('sleep 0.3', 0.8) for box in boxes))

  started = time.monotonic()
  assert [r.timed_out for r in run(use())] == [False] * 3
  assert time.monotonic() - started >= 0.9


def test_cancelling_kills_the_command(run, make):
  """A rollout given up must not leave its command running."""
  box = make()

  async def use():
    with pytest.raises(asyncio.TimeoutError):
      await asyncio.wait_for(box.exec('sleep 0.6; touch late'), 0.2)
    await asyncio.sleep(0.8)
    return await box.exec('ls')

  assert run(use()).stdout == ''


async def _exists(path: Path):
  async with asyncio.timeout(30):
    while not path.exists():
      await asyncio.sleep(0.01)


def test_destroy_ends_everything(run):
  """Destroying kills what runs; afterwards each call says so."""

  async def use():
    box = await sandbox.create()
    running = asyncio.create_task(box.exec('touch begun; sleep 30'))
    await _exists(box.workspace / 'begun')
    directory = box.workspace
    await box.destroy()
    await box.destroy()
    assert (await running).returncode == 137
    for call in (box.exec('true'), box.read('f'), box.write('f', b''), box.snapshot()):
      with pytest.raises(sandbox.SandboxError, match='destroyed'):
        await call
    await asyncio.sleep(0.1)
    return directory

  started = time.monotonic()
  directory = run(use())
  assert time.monotonic() - started < 10
  assert not directory.exists()


def _children(pid: int) -> list[int]:
  text = Path(f'/proc/{pid}/task/{pid}/children').read_text()
  return [int(child) for child in text.split()]


def test_infrastructure_failure_is_not_a_result(run, make):
  """Law 5: when the sandbox dies under a command, nobody gets a reward of 0."""
  host = sandbox.Host(parallel_execs=7)  # a supervisor of its own
  box = make(host=host)
  supervisor = box._supervisor._process.pid
  directory = box._supervisor._directory

  async def use(kill):
    running = asyncio.create_task(box.exec('touch begun; sleep 30'))
    await _exists(box.workspace / 'begun')
    (box.workspace / 'begun').unlink()
    kill()
    with pytest.raises(sandbox.SandboxError):
      await running

  snapshot = run(box.snapshot())
  run(use(lambda: os.kill(_children(supervisor)[0], signal.SIGKILL)))  # process 1
  for call in (box.restore(snapshot), box.listen(8080)):
    with pytest.raises(sandbox.SandboxError):
      run(call)
  with pytest.raises(sandbox.SandboxError, match='destroyed'):
    run(box.exec('echo fine'))
  box = make(host=host)
  assert run(box.exec('echo fine')).stdout == 'fine\n'
  run(use(lambda: os.kill(supervisor, signal.SIGKILL)))
  with pytest.raises(sandbox.SandboxError, match='supervisor'):
    run(box.exec('true'))
  assert not os.path.exists(directory)
  again = make(host=host)  # a new supervisor takes over
  assert run(again.exec('echo fine')).stdout == 'fine\n'
  assert not _groups_of(supervisor)


def test_a_supervisor_that_dies_leaves_no_caller_waiting(run, make):
  """Also while sandboxes are being made; nor does it leave their processes."""
  host = sandbox.Host(parallel_execs=11)  # a supervisor of its own
  pid = make(host=host).supervisor_pid

  async def use():
    made = [asyncio.ensure_future(sandbox.create(host=host)) for _ in range(6)]
    while len(_children(pid)) == 1:
      await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    return await asyncio.wait_for(asyncio.gather(*made, return_exceptions=True), 10)

  found = run(use())
  assert any(isinstance(box, sandbox.SandboxError) for box in found), found
  deadline = time.monotonic() + 5
  while _session_of(pid) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not _session_of(pid)


def _session_of(pid: int) -> list[bytes]:
  """Processes that a supervisor, the leader of a session, has forked."""
  found = subprocess.run(['pgrep', '-s', str(pid)], capture_output=True, check=False)
  return [child for child in found.stdout.split() if int(child) != pid]


def _groups_of(pid: int | str) -> list[Path]:
  return list(Path('/sys/fs/cgroup').glob(f'**/m2jax-{pid}-*'))


def test_nothing_survives_sigkill_of_the_caller(tmp_path):
  """kill -9 of the job leaves no process, directory or control group behind."""
  script = textwrap.dedent("""
    import asyncio, os, signal
    from m2jax import sandbox
    async def main():
      boxes = [await sandbox.create() for _ in range(3)]
      runs = [asyncio.create_task(b.exec('exec -a marker sleep 60')) for b in boxes]
      await asyncio.sleep(0.5)
      print(boxes[0]._supervisor._process.pid, boxes[0]._supervisor._directory)
    with asyncio.Runner() as runner:
      runner.run(main())
      os.sys.stdout.flush()
      os.kill(os.getpid(), signal.SIGKILL)
  """)
  done = subprocess.run(
    [sys.executable, '-c', script], capture_output=True, text=True, timeout=60
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  pid, directory = done.stdout.split()
  deadline = time.monotonic() + 10
  while os.path.exists(f'/proc/{pid}') and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not os.path.exists(f'/proc/{pid}')
  assert not os.path.exists(directory)
  assert not _groups_of(pid)


def test_a_command_costs_the_caller_little(run, make):
  """The caller is a busy JAX process: a command must not cost it a fork."""
  box = make(contents={'f': b'a\n'})
  run(box.exec('true'))
  before = resource.getrusage(resource.RUSAGE_SELF)

  async def use():
    for _ in range(30):
      assert (await box.exec('wc -l f')).returncode == 0

  run(use())
  after = resource.getrusage(resource.RUSAGE_SELF)
  spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  assert spent / 30 < 2e-3


@pytest.mark.parametrize('name', list(api.Limits.__dataclass_fields__))
@pytest.mark.parametrize('value', [0, -1, '5', None, True])
def test_bad_limits_name_the_field(name, value):
  """Law 9: a broken config says which field is wrong."""
  with pytest.raises(ValueError, match=f'Limits.{name}'):
    sandbox.Limits(**{name: value})


def test_bad_backend_and_names(run):
  """Unknown backends and names that leave the workspace are rejected."""
  with pytest.raises(ValueError, match='rlimit_only'):
    run(sandbox.create(backend='chroot'))
  for name in ('../x', '/etc/passwd', '', 'a/../../x'):
    with pytest.raises(sandbox.SandboxPathError):
      run(sandbox.create(contents={name: b''}))


def test_rlimit_only_is_asked_for_by_name_and_limits(run, make):
  """The weaker mode works without namespaces, and still ends what it starts."""
  limits = sandbox.Limits(cpu_s=1, output_bytes=100, wall_s=60, memory_bytes=256 << 20)
  box = make(backend='rlimit_only', contents={'f': b'a\n'}, limits=limits)
  assert run(box.exec('wc -l < f')).stdout == '1\n'
  assert run(box.exec('sleep 5', 0.2)).timed_out
  assert run(box.exec('while :; do :; done')).returncode in (137, 152)
  result = run(box.exec('head -c 10000 /dev/zero'))
  assert (len(result.stdout), result.truncated) == (100, True)
  run(box.exec('(sleep 0.5; touch late) &'))
  time.sleep(0.8)
  assert run(box.exec('ls')).stdout == 'f\n'
  directory = box.workspace
  if _ROOT:
    assert run(box.exec('id -u')).stdout.strip() != '0'
  assert stat.S_IMODE(directory.stat().st_mode) == 0o700
  run(box.destroy())
  assert not directory.exists()


def test_capabilities_are_measured(run):
  """In namespaces every property and limit must hold; the weaker mode admits."""
  strong = run(sandbox.capabilities())
  assert all(strong.isolation.values()), strong
  assert all(strong.limits.values()), strong
  weak = run(sandbox.capabilities('rlimit_only'))
  assert not weak.isolation['network'] and not weak.isolation['host files']
  assert not weak.isolation['neighbours']
  assert weak.limits['workspace_bytes'] is None
  assert weak.limits['wall_s'] and weak.limits['cpu_s']


@pytest.mark.smoke
def test_fails_closed_where_namespaces_are_not_allowed(run, make):
  """Here: within a sandbox, which allows none."""
  package = Path(sandbox.__file__).parent
  host = sandbox.Host(
    read_only=(
      (sys.base_prefix, sys.base_prefix),
      (str(package), '/m2jax/sandbox'),
    )
  )
  box = make(host=host)
  python = os.path.join(sys.base_prefix, 'bin', 'python3')
  done = run(box.exec(f'PYTHONPATH=/ {python} -m m2jax.sandbox --quick'))
  assert done.returncode == 1, done
  reason, fix = done.stderr.strip().rsplit('\n', 1)
  assert 'unshare the user namespace' in reason, reason
  assert fix.startswith('fix: ')


def test_fails_closed_where_the_filter_is_lost(run, monkeypatch, tmp_path):
  """A supervisor that loads no filter is found out by the first command."""
  script = tmp_path / 'supervisor'
  shutil.copytree(client._SCRIPT, script)
  init = script / 'init.py'
  init.write_text(init.read_text().replace('calls.load()', 'pass'))
  monkeypatch.setattr(client, '_SCRIPT', script)
  host = sandbox.Host(parallel_execs=9)  # a supervisor of its own
  with pytest.raises(
    sandbox.SandboxUnavailable, match='no system call filter'
  ) as error:
    run(sandbox.create(host=host))
  assert error.value.fix


def _command_line(*arguments: str):
  env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
  return subprocess.run(
    [sys.executable, '-m', 'm2jax.sandbox', *arguments],
    capture_output=True,
    text=True,
    timeout=60,
    env=env,
  )


def test_command_line_reports():
  """`python -m m2jax.sandbox` is what make asks before it starts a job."""
  done = _command_line('--quick', '--install')
  assert done.returncode == 0, done.stderr
  assert done.stdout == 'sandbox namespaces: ready\n'


@pytest.mark.parametrize('allowed', [True, False])
def test_install_where_it_may(tmp_path, monkeypatch, allowed):
  """make installs libseccomp by the package manager; without it there is no filter."""
  install = f'#!/bin/sh\n[ $1 = update ] || : > {tmp_path}/installed\n'
  refuse = '#!/bin/sh\nexit 1\n'
  pass_on = '#!/bin/sh\nshift\nexec "$@"\n'
  tools = {'apt-get': install if allowed else refuse, 'sudo': pass_on}
  for name, text in tools.items():
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
  monkeypatch.setattr(seccomp, 'is_installed', lambda: False)
  unavailable.install()
  assert (tmp_path / 'installed').exists() == allowed


def test_directories_of_killed_processes_are_removed(tmp_path, monkeypatch):
  """By the next process; not those of living ones, of others, or links."""
  hold = (
    'import sys, time; from m2jax.sandbox import temporary; '
    'print(temporary.directory("m2jax-x-", sys.argv[1])[0], flush=True); time.sleep(60)'
  )
  command = [sys.executable, '-c', hold, str(tmp_path)]
  env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
  living, killed = (
    subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    for _ in range(2)
  )
  try:
    kept, left = (Path(p.stdout.readline().strip()) for p in (living, killed))
    killed.kill()
    killed.wait()
    (left / 'deep').mkdir()
    link = tmp_path / 'm2jax-x-link'
    link.symlink_to(tmp_path)
    temporary.directory('m2jax-x-', str(tmp_path))
    assert left.exists()  # too young: it may not be locked yet
    monkeypatch.setattr(temporary, '_YOUNG_S', 0.0)
    temporary.directory('m2jax-x-', str(tmp_path))
    assert kept.exists() and link.exists() and not left.exists()
  finally:
    for process in (living, killed):
      process.kill()
      process.communicate()
