"""Hostile commands: each gets its clear outcome and leaves the host as it was."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest

from m2jax import sandbox
from m2jax.sandbox import seccomp
from tests.sandbox import attacks

_MIB = 1 << 20
# Control groups on and off: rlimits alone must hold too.
_HOSTS = [
  pytest.param(sandbox.Host(), id='cgroups'),
  pytest.param(sandbox.Host(cgroups=False), id='rlimits'),
]


@pytest.fixture(scope='module')
def unprivileged(tmp_path_factory):
  """{attack: error} of all attacks, by one process of a user who may do nothing, with
  what that user may read."""
  python = sys.executable if _others_may_run(sys.executable) else '/usr/bin/python3'
  if os.geteuid() != 0:
    pytest.skip('the other cases run as this user')
  version = [python, '-c', 'import sys; sys.exit(sys.version_info < (3, 11))']
  if subprocess.run(version, check=False).returncode:
    pytest.skip('no interpreter that another user may run')
  with tempfile.TemporaryDirectory(dir='/tmp') as directory:
    os.chmod(directory, 0o755)
    package = Path(sandbox.__file__).parent
    shutil.copytree(package, f'{directory}/m2jax/sandbox')
    shutil.copy(package.parent / '__init__.py', f'{directory}/m2jax')
    shutil.copy(attacks.__file__, directory)
    done = subprocess.run(
      [python, f'{directory}/attacks.py', *(a.__name__ for a in _ATTACKS if _here(a))],
      user=65534,
      group=65534,
      extra_groups=[],
      cwd='/',
      env={'PATH': os.environ['PATH'], 'PYTHONPATH': directory},
      capture_output=True,
      text=True,
      timeout=300,
    )
  assert done.returncode == 0, done.stderr
  return dict(map(json.loads, done.stdout.splitlines()))


def _others_may_run(program: str) -> bool:
  path = Path(program).resolve()
  return all(place.stat().st_mode & 0o001 for place in (path, *path.parents))


_ATTACKS = {  # and the processors they were written for
  attacks.seized_init: ('x86_64',),
  attacks.seizing: ('x86_64',),
  attacks.cancelled_again_destroyed: (),
  attacks.read_after_cancel: (),
  attacks.destroy_kills: (),
  attacks.one_sandbox_fails: (),
  attacks.locked_out: (),
  attacks.unreadable: (),
  attacks.shared_input: (),
  attacks.core_dump: (),
  attacks.keyring: ('x86_64', 'aarch64'),
  attacks.inodes: (),
  attacks.odd_commands: (),
  attacks.system_calls: ('x86_64',),
  attacks.ordinary: (),
}


def _here(attack) -> bool:
  return platform.machine() in (_ATTACKS[attack] or (platform.machine(),))


@pytest.mark.parametrize('attack', list(_ATTACKS), ids=lambda attack: attack.__name__)
@pytest.mark.parametrize('caller', ['cgroups', 'rlimits', 'unprivileged'])
def test_attack(run, request, attack, caller):
  """Each attack of attacks.py, with and without control groups and privileges."""
  if not _here(attack):
    pytest.skip('written for other processors')
  name = attack.__name__
  if caller == 'unprivileged':
    assert request.getfixturevalue('unprivileged')[name] == ''
  else:
    run(attack(attacks.host_of(name, cgroups=caller == 'cgroups')))


def test_host_settings_cannot_be_written(run, make):
  """Regression: started by root, a sandbox may leave the host's /proc/sys writable.

  facts/pipelines.md §1.2: a write to vm/drop_caches succeeded.
  """
  box = make()
  assert run(box.exec('echo 1 > /proc/sys/vm/drop_caches')).returncode != 0
  found = run(box.exec('find /proc/sys /proc/irq /proc/bus -type f -writable'))
  assert found.stdout == '', found


_FORK_UNTIL_REFUSED = """
import os, time
count = 0
try:
  while count < 60:
    if os.fork() == 0:
      time.sleep(30)
    count += 1
except OSError:
  pass
print(count, flush=True)
"""


@pytest.mark.parametrize('host', _HOSTS)
def test_process_limit_holds(run, make, host):
  """Regression: started by root, RLIMIT_NPROC is ignored (60 forks of 60 passed)."""
  box = make(
    host=host,
    contents={'fork.py': _FORK_UNTIL_REFUSED.encode()},
    limits=sandbox.Limits(processes=20),
  )
  result = run(box.exec('python3 fork.py'))
  assert 10 <= int(result.stdout) < 20, result


@pytest.mark.parametrize('host', _HOSTS)
def test_process_limit_is_each_sandboxs_own(run, make, host):
  """One sandbox full of processes must not keep its neighbours from forking."""
  import asyncio

  limits = sandbox.Limits(processes=12)
  boxes = [make(host=host, limits=limits) for _ in range(6)]
  fill = 'for i in 1 2 3 4 5 6 7 8; do sleep 0.5 & done; wait; echo done'

  async def use():
    return await asyncio.gather(*(box.exec(fill) for box in boxes))

  assert [r.stdout for r in run(use())] == ['done\n'] * 6


@pytest.mark.parametrize('host', _HOSTS)
def test_fork_bomb(run, make, host):
  """Contained while it runs, dead when its time is over, the next command works."""
  box = make(host=host, limits=sandbox.Limits(processes=32))
  result = run(box.exec(':(){ :|:& };:; wait; sleep 30', 1.0))
  assert result.timed_out and result.returncode == 124
  assert result.wall_s < 5
  assert run(box.exec('echo alive')).stdout == 'alive\n'


_FILL = {
  'big file': 'yes > a; yes > b; yes > c',
  'many files': 'for i in {1..40}; do head -c 1M /dev/zero > $i; done',
  'allocated': 'for i in 1 2 3 4 5 6 7 8 9; do fallocate -l 2M $i; done',
  'deleted but open': (
    'for i in 1 2 3 4 5 6 7 8 9; do exec {fd}> x; rm x; head -c 2M /dev/zero >&$fd; '
    'done'
  ),
  'scratch': 'head -c 20M /dev/zero > /tmp/a; head -c 20M /dev/zero > /dev/shm/a',
  'elsewhere': 'for d in / /dev /etc /usr /proc /dev/pts; do echo > $d/fill; done',
}


@pytest.mark.parametrize('how', list(_FILL))
def test_filling_the_disk(run, make, how):
  """Every writable place has a size that the kernel holds; the host loses nothing."""
  limits = sandbox.Limits(workspace_bytes=8 * _MIB, file_bytes=4 * _MIB)
  box = make(limits=limits)
  before = os.statvfs('/tmp').f_bavail * os.statvfs('/tmp').f_frsize
  used = 'df -B1 --output=used /workspace /tmp /dev/shm | tail -n +2'
  result = run(box.exec(f'{_FILL[how]}\n{used}', 20))
  sizes = [int(size) for size in result.stdout.split()]
  assert len(sizes) == 3 and max(sizes) <= 8 * _MIB, result
  assert result.stderr  # the command got an error message
  lost = before - os.statvfs('/tmp').f_bavail * os.statvfs('/tmp').f_frsize
  assert lost < 512 * _MIB  # others write too
  if how in ('big file', 'many files'):
    with pytest.raises(OSError, match='space'):
      run(box.write('more', bytes(8 * _MIB)))
  run(box.exec('rm -rf *'))
  assert run(box.exec('echo room > left')).returncode == 0


def test_millions_of_empty_files(run, make):
  """Inodes are limited too: they are the kernel's memory."""
  box = make(limits=sandbox.Limits(cpu_s=20))
  many = 'for i in {1..200}; do touch $i-{1..100} || exit 7; done'
  assert run(box.exec(many, 20)).returncode == 7


def test_loop_for_ever(run, make):
  """A loop meets the CPU limit, a sleep the wall-clock limit."""
  box = make(limits=sandbox.Limits(cpu_s=1))
  result = run(box.exec('while :; do :; done', 20))
  assert result.returncode in (137, 152) and not result.timed_out
  result = run(box.exec('trap "" TERM INT XCPU; sleep 60; sleep 60', 0.5))
  assert result.timed_out and result.returncode == 124 and result.wall_s < 3


@pytest.mark.parametrize(
  'flood',
  ['head -c 1G /dev/zero', 'yes', 'yes >&2', 'yes & yes >&2 & (setsid yes &) ; wait'],
)
def test_endless_output(run, make, flood):
  """1 GB of output is cut as it comes: neither side ever holds it."""
  box = make(limits=sandbox.Limits(output_bytes=10_000))
  result = run(box.exec(f'echo first; echo first >&2; {flood}', 20))
  assert result.truncated and not result.timed_out
  assert result.returncode == 137
  assert result.stdout.startswith('first\n') and len(result.stdout) <= 10_000
  assert result.stderr.startswith('first\n') and len(result.stderr) <= 10_000
  status = Path(f'/proc/{box.supervisor_pid}/status').read_text()
  peak_kib = int(status.split('VmHWM:')[1].split()[0])
  assert peak_kib < 64 << 10


def test_some_output_too_much_is_only_cut(run, make):
  """A talkative build still finishes: its output is cut, its work is kept."""
  box = make(limits=sandbox.Limits(output_bytes=10_000))
  result = run(box.exec('seq 20000; echo done > f'))
  assert result.returncode == 0 and result.truncated
  assert result.stdout == '\n'.join(map(str, range(1, 20001)))[:10_000]
  assert run(box.read('f')) == b'done\n'


def test_memory_without_control_groups_is_not_claimed(run):
  """64 processes with a limit each are no limit of the sandbox: the report says so."""
  reported = run(sandbox.capabilities(host=sandbox.Host(cgroups=False)))
  assert reported.limits['memory_bytes'] is None
  assert any('memory_bytes' in note for note in reported.notes)
  assert all(held for name, held in reported.limits.items() if name != 'memory_bytes')


def test_a_missing_filter_is_not_claimed(run, monkeypatch):
  """Without libseccomp there is a sandbox, and a report of what it lacks."""
  monkeypatch.setattr(seccomp, '_LIBRARY', 'libseccomp.so.missing')
  monkeypatch.setattr(seccomp, 'programs', seccomp.programs.__wrapped__)
  reported = run(sandbox.capabilities(host=sandbox.Host(parallel_execs=33)))
  assert not reported.isolation['system calls']
  assert not reported.isolation['core dump handlers']
  assert reported.isolation['process 1'] and reported.isolation['network']
  assert any('libseccomp' in note and '--install' in note for note in reported.notes)


def test_swap_counts(make):
  """The limit is of memory and swap together, where there are control groups."""
  box = make(limits=sandbox.Limits(memory_bytes=96 * _MIB))
  kind = box.supervisor_facts['cgroups']
  if kind == 'none':
    pytest.skip('no control groups')
  name = f'm2jax-{box.supervisor_pid}-{box._number}'
  groups = list(Path('/sys/fs/cgroup').glob(f'**/{name}'))
  file, limit = 'memory.swap.max', 0
  if kind == 'v1':
    file, limit = 'memory.memsw.limit_in_bytes', 96 * _MIB
  found = [int((g / file).read_text()) for g in groups if (g / file).exists()]
  assert groups and found == [limit] * box.supervisor_facts['counts_swap']


@pytest.mark.parametrize('host', _HOSTS)
def test_memory_hog(run, make, host):
  """Memory is limited, by the kernel's killer or by failing allocation."""
  box = make(host=host, limits=sandbox.Limits(memory_bytes=96 * _MIB))
  result = run(box.exec('python3 -c "x = bytearray(300 << 20); print(1)"'))
  assert result.returncode != 0 and result.stdout == ''
  grouped = box.supervisor_facts['cgroups'] != 'none'
  assert result.oom == grouped
  if not grouped:
    assert 'MemoryError' in result.stderr
  fine = run(box.exec('python3 -c "x = bytearray(8 << 20); print(1)"'))
  assert fine.stdout == '1\n' and not fine.oom


def test_daemon_does_not_outlive_its_command(run, make):
  """setsid, nohup and a double fork do not leave the process namespace."""
  box = make()
  daemon = "(setsid nohup sh -c 'sleep 2; touch late' > /dev/null 2>&1 &)"
  result = run(box.exec(f'{daemon} ; echo started'))
  assert result.stdout == 'started\n' and result.wall_s < 2
  time.sleep(2.5)
  assert run(box.exec('ls')).stdout == ''


def test_no_network(run, make):
  """Neither the host's loopback nor anything else can be reached."""
  with socket.create_server(('127.0.0.1', 0)) as server:
    server.setblocking(False)
    box = make()
    port = server.getsockname()[1]
    assert run(box.exec(f'exec 3<>/dev/tcp/127.0.0.1/{port}')).returncode != 0
    with pytest.raises(BlockingIOError):
      server.accept()
  assert run(box.exec('exec 3<>/dev/udp/192.0.2.1/53')).returncode != 0
  devices = run(box.exec('tail -n +3 /proc/net/dev')).stdout
  assert [line.split(':')[0].strip() for line in devices.splitlines()] == ['lo']


def test_no_abstract_socket_of_the_host(run, make):
  """Abstract Unix sockets belong to the network namespace: the host's are absent."""
  name = f'm2jax-test-{os.getpid()}'
  with socket.socket(socket.AF_UNIX) as server:
    server.bind('\0' + name)
    server.listen()
    script = f"import socket; socket.socket(1).connect('\\0{name}')"
    result = run(make(contents={'c.py': script.encode()}).exec('python3 c.py'))
  assert 'ConnectionRefusedError' in result.stderr


_SERVE = r"""
import socket, time
tcp = socket.create_server(('127.0.0.1', 8123))
name = socket.socket(socket.AF_UNIX)
name.bind('\0rendezvous')
name.listen()
socket.create_connection(('127.0.0.1', 8123))  # the own loopback works
print('serving', flush=True)
time.sleep(2)
"""
_CONNECT = r"""
import socket
for family, address in ((2, ('127.0.0.1', 8123)), (1, '\0rendezvous')):
  print(socket.socket(family).connect_ex(address))
"""


def test_a_network_is_never_shared_between_living_sandboxes(run, make):
  """No address of another sandbox is within reach, abstract names included."""
  boxes = [
    make(contents={'serve.py': _SERVE.encode(), 'connect.py': _CONNECT.encode()})
    for _ in range(3)
  ]

  async def serve_and_connect():
    serving = asyncio.create_task(boxes[0].exec('python3 serve.py'))
    await asyncio.sleep(0.7)
    found = [await box.exec('python3 connect.py') for box in boxes[1:]]
    return await serving, found

  served, found = run(serve_and_connect())
  assert served.stdout == 'serving\n', served
  refused = f'{errno.ECONNREFUSED}\n' * 2
  assert [result.stdout for result in found] == [refused] * 2


# The kernel keeps IPv6 flow labels for seconds after their socket.
_LEAVE = r"""
import socket, struct
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
peer = socket.inet_pton(socket.AF_INET6, '::1')
request = peer + struct.pack('!I', 42) + struct.pack('=BBHHHI', 0, 1, 3, 60, 60, 0)
s.setsockopt(41, 32, request)  # IPV6_FLOWLABEL_MGR
"""


def test_no_network_is_used_again(run, make):
  """Without the filter, too, nothing that an earlier sandbox left is found."""
  host = sandbox.Host(parallel_execs=30)  # a supervisor of its own
  with attacks.no_filter():  # which does not let a command set them
    make(host=host)
  count = 'tail -n +2 /proc/net/ip6_flowlabel | wc -l'
  first = make(host=host, contents={'leave.py': _LEAVE.encode()})
  assert run(first.exec(f'python3 leave.py; {count}')).stdout == '1\n'
  run(first.destroy())
  assert run(make(host=host).exec(count)).stdout == '0\n'


# One sandbox says something by the files that both read, the other looks.
_SAY = r"""
import fcntl, os, select, time
files = [os.open(path, os.O_RDONLY) for path in PATHS]
for fd in files:
  fcntl.flock(fd, fcntl.LOCK_EX)
open('/workspace/said', 'w').close()
while True:
  for path in PATHS:
    os.close(os.open(path, os.O_RDONLY))
  time.sleep(0.01)
"""
_HEAR = r"""
import ctypes, fcntl, os, select
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0)
for path in PATHS:
  fd = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    print('locked', path)
  os.close(fd)
for path in PATHS:
  libc.inotify_add_watch(watch, path.encode(), 0x20)  # IN_OPEN
if select.select([watch], [], [], 0.2)[0]:
  print('opened')
"""
_SHARED = ('/', '/usr', '/usr/bin/env', '/etc', '/etc/passwd', '/proc/1', '/dev')


def test_neighbours_share_no_locks_and_no_watches(run, make):
  """Two living sandboxes cannot talk by the files that both read."""
  paths = _SHARED + (('/dev/null',) if os.geteuid() == 0 else ())
  one, other = (
    make(contents={'a.py': f'PATHS = {paths}\n{text}'.encode()})
    for text in (_SAY, _HEAR)
  )

  async def talk():
    saying = asyncio.create_task(one.exec('python3 a.py'))
    while not (one.workspace / 'said').exists() and not saying.done():
      await asyncio.sleep(0.01)
    assert not saying.done(), saying.result()
    heard = await other.exec('python3 a.py')
    saying.cancel()
    return heard

  heard = run(talk())
  assert (heard.returncode, heard.stdout) == (0, ''), heard


_NETLINK = """
import socket
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2)
"""
_TCP = r"""
import socket
server = socket.create_server(('127.0.0.1', 5000), backlog=500)
total, held = 0, []
while total < 200 << 20 and len(held) < 230:
  a = socket.create_connection(('127.0.0.1', 5000))
  b, _ = server.accept()
  a.setblocking(False)
  try:
    while True:
      total += a.send(b'x' * 65536)
  except BlockingIOError:
    held += [a, b]
print(total >> 20)
"""


def test_memory_of_the_kernel_is_bounded(run, make):
  """What control groups do not count is refused, or small: TCP buffers, attributes."""
  limits = sandbox.Limits(memory_bytes=64 * _MIB)
  box = make(contents={'n.py': _NETLINK.encode(), 't.py': _TCP.encode()}, limits=limits)
  assert 'Protocol not supported' in run(box.exec('python3 n.py')).stderr
  set_attribute = 'import os; os.setxattr("/workspace", "user.x", b"y")'
  result = run(box.exec(f"python3 -c '{set_attribute}'"))
  assert 'Function not implemented' in result.stderr
  held = run(box.exec('python3 t.py'))
  assert held.oom or int(held.stdout) <= 64, held


_SHARED_TABLES = """
import os, socket, struct
terminals = 0
try:
  while terminals < 100:
    os.openpty()
    terminals += 1
except OSError:
  pass
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.setsockopt(41, 32, bytes(32))  # IPV6_FLOWLABEL_MGR
print(terminals <= 64, open('/proc/net/ip6_flowlabel').read().count('\\n'))
print(open('/proc/locks').read(), end='')
"""


def test_tables_of_the_machine_stay_free(run, make):
  """Pseudo terminals are bounded, flow labels not to be had, locks not to be seen."""
  result = run(make(contents={'a.py': _SHARED_TABLES.encode()}).exec('python3 a.py'))
  assert result.stdout == 'True 1\n', result


def test_hidden_paths_are_those_of_the_sandbox(run, make, tmp_path):
  """A link in a tree is followed in the sandbox's root, not in the machine's."""
  tmp_path.chmod(0o755)
  (tmp_path / 'link').symlink_to('/usr/share')
  host = sandbox.Host(read_only=((str(tmp_path), '/t'),), hidden=('/t/link/',))
  assert run(make(host=host).exec('ls /t/link/ /usr/share')).stdout.split() == [
    '/t/link/:',
    '/usr/share:',
  ]


def test_an_older_libseccomp_allows_less(monkeypatch):
  """A call whose name it does not know fails, and the filter is made all the same."""
  number = seccomp._Filter.number
  unknown = {'openat2', 'clone3', 'epoll_pwait2', 'close_range', 'cachestat'}
  monkeypatch.setattr(
    seccomp._Filter, 'number', lambda rules, n: -1 if n in unknown else number(rules, n)
  )
  older, reason = seccomp.programs.__wrapped__()
  now, _ = seccomp.programs()
  assert not reason and len(older[1]) < len(now[1])
  unknown.add('execve')
  assert seccomp.programs.__wrapped__() == ((), mock.ANY)


def test_ended_commands_leave_no_process_behind(run, make):
  """Not even as zombies: a container without an init would run out of numbers."""
  box = make()
  supervisor = box.supervisor_pid

  def descendants(pid: int) -> set[int]:
    with contextlib.suppress(OSError):
      text = Path(f'/proc/{pid}/task/{pid}/children').read_text()
      children = {int(child) for child in text.split()}
      return children.union(*map(descendants, children))
    return set()

  async def use():
    running = asyncio.create_task(box.exec('sleep 1'))
    while len(started := descendants(supervisor)) < 2 and not running.done():
      await asyncio.sleep(0.01)
    await running
    return started

  started = run(use())
  assert len(started) >= 2  # process 1, the command
  run(box.exec('(sleep 0.1 &); sleep 0.2'))
  assert len([pid for pid in started if Path(f'/proc/{pid}').exists()]) == 1
  run(box.destroy())
  assert not [pid for pid in started if Path(f'/proc/{pid}').exists()]


def test_host_files_are_absent(run, make, tmp_path):
  """Nothing of the host but /usr and a bare /etc, not even by name."""
  (tmp_path / 'secret').write_text('x')
  listing = run(make().exec(f'ls {tmp_path}; ls /; ls /etc')).stdout.split()
  allowed = {'bin', 'dev', 'etc', 'lib', 'lib32', 'lib64', 'libx32', 'proc', 'sbin'}
  allowed |= {'tmp', 'usr', 'workspace', 'passwd', 'group', 'hosts', 'nsswitch.conf'}
  allowed |= {'empty', 'alternatives', 'ld.so.cache', 'fonts', 'libreoffice'}
  from m2jax.sandbox import api

  allowed |= {Path(place).parts[1] for _, place in api.default_python()}
  assert set(listing) <= allowed


def test_no_privileges(run, make):
  """No capabilities, none to be gained, no new user namespace, no host processes."""
  box = make()
  status = run(box.exec('grep -E "^(Cap|NoNewPrivs)" /proc/self/status')).stdout
  values = dict(line.split(':\t') for line in status.splitlines())
  assert values.pop('NoNewPrivs') == '1'
  assert values.pop('CapBnd') and all(int(v, 16) == 0 for v in values.values())
  assert run(box.exec('unshare -Ur true')).returncode != 0
  assert run(box.exec('mount -t tmpfs none /tmp')).returncode != 0
  pids = run(box.exec('ls -d /proc/[0-9]*')).stdout.split()
  assert len(pids) <= 3
  open_files = 'for n in {3..99}; do [ -e /proc/$$/fd/$n ] && echo $n; done'
  assert run(box.exec(open_files)).stdout == ''


def test_limits_cannot_be_raised_from_inside(run, make):
  """Hard limits: the shell that set them runs before the command, not with it."""
  box = make(limits=sandbox.Limits(processes=20))
  result = run(box.exec('ulimit -u 4000; ulimit -f unlimited; ulimit -t 9999; env'))
  assert result.stderr.count('Operation not permitted') == 3
  assert 'M2JAX' not in result.stdout and 'BASH_ENV' not in result.stdout


def test_links_do_not_lead_out(run, make, tmp_path):
  """A command may put links where files were: the host side never follows one."""
  secret = tmp_path / 'secret'
  secret.write_text('original')
  secret.chmod(0o666)
  tmp_path.chmod(0o777)
  box = make(contents={'answer.txt': b'x', 'd/f': b'x'})
  swap = f'ln -sf {secret} answer.txt; rm -r d; ln -s {tmp_path} d; ln -s / root'
  assert run(box.exec(swap)).returncode == 0
  for path in ('answer.txt', 'd/secret', f'root{secret}'):
    with pytest.raises(sandbox.SandboxPathError):
      run(box.read(path))
  run(box.write('answer.txt', b'new'))  # in place of the link
  assert run(box.read('answer.txt')) == b'new'
  with pytest.raises(sandbox.SandboxPathError):
    run(box.write('d/secret', b'new'))
  snapshot = run(box.snapshot())
  assert b'original' not in snapshot
  run(box.restore(snapshot))
  assert run(box.exec('readlink d')).stdout.strip() == str(tmp_path)
  assert secret.read_text() == 'original'
  assert os.listdir(tmp_path) == ['secret']


def test_pipes_and_oversize_do_not_block_the_reader(run, make):
  """A pipe in place of a file would block its reader for ever."""
  box = make(limits=sandbox.Limits(file_bytes=4 * _MIB))
  run(box.exec('mkfifo pipe; mkdir dir; truncate -s 3M big'))
  started = time.monotonic()
  for path in ('pipe', 'dir', 'pipe/x'):
    with pytest.raises(sandbox.SandboxPathError):
      run(box.read(path))
  with pytest.raises(sandbox.SandboxPathError, match='larger'):
    run(box.read('big', max_bytes=_MIB))
  with pytest.raises(FileNotFoundError):
    run(box.read('nothing'))
  run(box.snapshot())
  run(box.write('pipe', b'now a file'))
  assert run(box.read('pipe')) == b'now a file'
  assert time.monotonic() - started < 60
