"""Attacks on a sandbox, each a coroutine that asserts what must hold afterwards.

They need only the standard library, so that test_hostile.py can run them in its
own process and, as `python tests/sandbox/attacks.py NAME…`, in one of a user who may do
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

from m2jax import sandbox
from m2jax.sandbox import seccomp

WITHOUT_FILTER = 'seized_init', 'keyring'

# Attaches to process 1.
_SEIZE = r"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
if libc.ptrace(16, 1, None, None) == -1:
  sys.exit(f'ptrace: {os.strerror(ctypes.get_errno())}')
print('seized', flush=True)
"""
_DAEMON = r"""
import os, socket, time
if os.fork():
  os._exit(0)
os.setsid()
server = socket.create_server(('127.0.0.1', 8123))
for number in range(200):
  with open('/workspace/alive', 'w') as f:
    f.write(str(number))
  if number == 0:
    for fd in (0, 1, 2):
      os.close(fd)
  time.sleep(0.02)
"""
_WRITER = 'i=0; while :; do echo $((i++)) > beat; done'


@contextlib.contextmanager
def no_filter():
  """As on a machine without libseccomp."""
  with mock.patch.object(seccomp, 'programs', lambda: ((), 'a test')):
    yield


async def _stands_still(box: sandbox.Sandbox, name: str, wait_s: float = 0.3) -> bool:
  """Whether nobody writes a file of the workspace any more."""
  before = await box.read(name)
  await asyncio.sleep(wait_s)
  return await box.read(name) == before


async def seized_init(host: sandbox.Host) -> None:
  """Without a filter, too, process 1 is out of reach, and a daemon ends in time."""
  files = {'seize.py': _SEIZE.encode(), 'daemon.py': _DAEMON.encode()}
  with no_filter():
    box = await sandbox.create(contents=files, host=host)
  command = (
    'python3 seize.py; kill -9 1; python3 daemon.py; until [ -s alive ]; do :; done'
  )
  result = await box.exec(command)
  assert 'ptrace: Operation not permitted' in result.stderr, result
  assert await _stands_still(box, 'alive')
  # User namespaces, which give privileges over others, are not to be had either.
  assert (await box.exec('unshare -Ur true')).returncode
  await box.destroy()


async def seizing(host: sandbox.Host) -> None:
  """With the filter init cannot be seized, and its memory is out of reach."""
  async with await sandbox.create(
    contents={'seize.py': _SEIZE.encode()}, host=host
  ) as box:
    result = await box.exec('python3 seize.py')
    assert 'Function not implemented' in result.stderr, result
    for file in ('mem', 'task/1/mem', 'root', 'cwd', 'fd/0', 'environ', 'ns/pid'):
      found = await box.exec(f'ls -L /proc/1/{file}')
      assert found.returncode != 0, found


async def cancelled_again_destroyed(host: sandbox.Host) -> None:
  """`exec` cancelled, another `exec`, `destroy`: the neighbour notices nothing."""
  neighbour = await sandbox.create(host=host)
  running = asyncio.create_task(neighbour.exec('sleep 1.5; echo whole'))
  await asyncio.sleep(0.2)
  pid = neighbour.supervisor_pid
  for wait_s in (0.0, 0.001, 0.01, 0.05, 0.2):
    box = await sandbox.create(host=host)
    first = asyncio.create_task(box.exec('trap "" TERM; sleep 30'))
    await asyncio.sleep(wait_s)
    first.cancel()
    second = asyncio.create_task(box.exec('sleep 30'))
    await asyncio.sleep(wait_s)
    started = time.monotonic()
    await asyncio.gather(box.destroy(), box.destroy())
    with contextlib.suppress(sandbox.SandboxError):
      assert (await second).returncode == 137
    assert time.monotonic() - started < 300
  assert (await running).stdout == 'whole\n'
  assert (await neighbour.exec('echo still')).stdout == 'still\n'
  assert neighbour.supervisor_pid == pid
  await neighbour.destroy()


async def read_after_cancel(host: sandbox.Host) -> None:
  """Who cancels a command and reads the workspace does not read while it writes."""
  async with await sandbox.create(host=host, contents={'beat': b''}) as box:
    for _ in range(20):
      running = asyncio.create_task(box.exec(_WRITER))
      await asyncio.sleep(0.03)
      running.cancel()
      assert await _stands_still(box, 'beat', 0.02)


async def destroy_kills(host: sandbox.Host) -> None:
  """`destroy` ends a running command at once, and returns when it has ended."""
  box = await sandbox.create(host=host)
  running = asyncio.create_task(box.exec('(setsid sleep 4242 &) ; sleep 4242'))
  async with asyncio.timeout(30):
    while len(_running('4242')) < 2:
      await asyncio.sleep(0.01)
  started = time.monotonic()
  await box.destroy()
  assert time.monotonic() - started < 30
  assert not _running('4242')
  assert (await running).returncode == 137


def _running(argument: str) -> list[str]:
  found = []
  for path in Path('/proc').glob('[0-9]*/cmdline'):
    with contextlib.suppress(OSError):
      if argument.encode() in path.read_bytes().split(b'\0'):
        found.append(str(path))
  return found


async def one_sandbox_fails(host: sandbox.Host) -> None:
  """What goes wrong with one sandbox ends neither the supervisor nor its neighbour."""
  async with await sandbox.create(host=host) as neighbour:
    for name in ('cpu_s', 'file_bytes', 'processes', 'workspace_bytes', 'wall_s'):
      limits = sandbox.Limits(**{name: 2**70})
      with contextlib.suppress(sandbox.SandboxError):
        async with await sandbox.create(host=host, limits=limits) as box:
          await box.exec('true')
    async with await sandbox.create(host=host) as box:
      for timeout_s in (float('nan'), 0.0, -1.0):
        with contextlib.suppress(ValueError):
          await box.exec('true', timeout_s)
          raise AssertionError(timeout_s)
      assert (await box.exec('echo fine', float('inf'))).stdout == 'fine\n'
    assert (await neighbour.exec('echo fine')).stdout == 'fine\n'


_LOCKS = (
  'chmod 0 .',
  'chmod 400 /workspace',
  'rm -rf *; chmod 7000 .',
  'chmod 0 /tmp /dev/shm || true',
)


async def locked_out(host: sandbox.Host) -> None:
  """A command cannot make the next one fail as the sandbox's failure, unrewarded."""
  async with await sandbox.create(host=host, contents={'f': b'x'}) as box:
    for lock in _LOCKS:
      assert (await box.exec(lock)).returncode == 0
      await box.snapshot()
      await box.write('g', b'y')
      result = await box.exec('cat g; touch h /tmp/h /dev/shm/h')
      assert (result.returncode, result.stdout) == (0, 'y'), result
  limits = sandbox.Limits(memory_bytes=24 << 20, workspace_bytes=48 << 20)
  async with await sandbox.create(host=host, limits=limits) as box:
    for size_kib in (20 << 10, 3 << 10, 900, 90, 9):
      await box.exec(f'head -c {size_kib}K /dev/zero > f{size_kib}')
    assert (await box.exec('true')).returncode in (0, 134, 137)
    assert (await box.exec('rm *; echo room')).returncode in (0, 134, 137)


async def unreadable(host: sandbox.Host) -> None:
  """What a command forbids its owner to read is saved and restored all the same."""
  async with await sandbox.create(
    host=host, contents={'d/e/f': b'x', 'g': b'y'}
  ) as box:
    await box.exec('chmod 0 g d/e/f; chmod 0 d/e; chmod 100 d')
    listing = (await box.exec('stat -c "%n %a" d g')).stdout
    snapshot = await box.snapshot()
    await box.exec('chmod -R 700 *; rm -rf *')
    await box.restore(snapshot)
    assert (await box.exec('stat -c "%n %a" d g')).stdout == listing == 'd 100\ng 0\n'
    assert (await box.exec('chmod -R 700 *; cat d/e/f g')).stdout == 'xy'


_OWN_FILE = r"""
import fcntl, os, sys, time
flags = fcntl.fcntl(0, fcntl.F_GETFL)
print(bool(flags & os.O_NONBLOCK), flush=True)
fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_NONBLOCK)
time.sleep(float(sys.argv[1]))
"""


async def shared_input(host: sandbox.Host) -> None:
  """No open file is shared: what one does to its /dev/null another does not see."""
  files = {'own.py': _OWN_FILE.encode()}
  one = await sandbox.create(host=host, contents=files)
  two = await sandbox.create(host=host, contents=files)
  running = asyncio.create_task(one.exec('python3 own.py 0.6'))
  await asyncio.sleep(0.3)
  assert (await two.exec('python3 own.py 0')).stdout == 'False\n'
  assert (await running).stdout == 'False\n'
  assert (await two.exec('cat; test -c /dev/null; echo $?')).stdout == '0\n'
  await asyncio.gather(one.destroy(), two.destroy())


_CRASH = r"""
import os, resource, signal
print(resource.getrlimit(resource.RLIMIT_CORE))
for soft, hard in ((0, 1), (0, 0)):
  try:
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    print('lowered')
  except (PermissionError, ValueError):
    pass
pid = os.fork()
if not pid:
  os.kill(os.getpid(), signal.SIGSEGV)
print(os.WCOREDUMP(os.waitpid(pid, 0)[1]))
"""


async def core_dump(host: sandbox.Host) -> None:
  """A crash makes no core file and cannot be made to feed the machine's handler."""
  async with await sandbox.create(
    host=host, contents={'crash.py': _CRASH.encode()}
  ) as box:
    result = await box.exec('python3 crash.py; ls')
    assert result.stdout == '(1, 1)\nFalse\ncrash.py\n', result


_KEYRING = """
import ctypes
number = {'x86_64': 250, 'aarch64': 219}[__import__('os').uname().machine]
print(ctypes.CDLL(None).syscall(number, 0, -3, 0), end='')
"""


async def keyring(host: sandbox.Host) -> None:
  """Each sandbox has a session keyring of its own, not the caller's."""
  keyctl = {'x86_64': 250, 'aarch64': 219}[platform.machine()]
  own = ctypes.CDLL(None).syscall(keyctl, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING
  with no_filter():
    boxes = [
      await sandbox.create(host=host, contents={'k.py': _KEYRING.encode()})
      for _ in range(3)
    ]
  serials = {(await box.exec('python3 k.py')).stdout for box in boxes}
  for box in boxes:
    await box.destroy()
  assert len(serials) == 3 and all(int(serial) > 0 for serial in serials), serials
  assert str(own) not in serials


_INODES = """
for d in /tmp /dev/shm /workspace; do
  i=0; while touch $d/$i-{1..400} 2> /dev/null; do
    i=$((i+1)); [ $i = 60 ] && break
  done
  echo $i; rm -rf $d/*
done
"""


async def inodes(host: sandbox.Host) -> None:
  """No place takes files without end, empty ones included."""
  limits = sandbox.Limits(cpu_s=60, wall_s=60)
  async with await sandbox.create(host=host, limits=limits) as box:
    result = await box.exec(_INODES)
    assert len(result.stdout.split()) == 3, result
    assert all(int(count) < 60 for count in result.stdout.split()), result


_CALLS = {  # x86_64: number and arguments of calls that must be denied
  'ptrace': (101, 0, 0, 0, 0),
  'process_vm_writev': (311, 2, 0, 0, 0, 0, 0),
  'keyctl': (250, 0, -3, 0),
  'add_key': (248, b'user', b'x', b'y', 1, -4),
  'request_key': (249, b'user', b'x', 0, 0),
  'userfaultfd': (323, 1),
  'io_uring_setup': (425, 4, 0),
  'io_uring_enter': (426, 0, 0, 0, 0, 0, 0),
  'memfd_create': (319, b'x', 0),
  'shmget': (29, 0, 4096, 0o1600),
  'semget': (64, 0, 1, 0o1600),
  'msgget': (68, 0, 0o1600),
  'mq_open': (240, b'x', 0o102, 0o600, 0),
  'personality': (135, 0x40000),
  'bpf': (321, 0, 0, 0),
  'perf_event_open': (298, 0, 0, -1, -1, 0),
  'mount': (165, b'x', b'/tmp', b'tmpfs', 0, 0),
  'unshare': (272, 0x10000000),
  'setns': (308, 0, 0),
  'clone into a user namespace': (56, 0x10000011, 0, 0, 0, 0),
  'clone3': (435, 0, 0),
  'setxattr': (188, b'/workspace', b'user.x', b'y', 1, 0),
  'io_setup': (206, 1, 0),
  'socket NETLINK_USERSOCK': (41, 16, 3, 2),
  'socket AF_VSOCK with upper bits': (41, (1 << 32) | 40, 1, 0),
  'socket AF_VSOCK': (41, 40, 1, 0),
  'socket AF_ALG': (41, 38, 5, 0),
  'socket AF_PACKET': (41, 17, 3, 0),
  'kexec_load': (246, 0, 0, 0, 0),
  'init_module': (175, 0, 0, b''),
  'open_by_handle_at': (304, -100, 0, 0),
  'pidfd_getfd': (438, 0, 0, 0),
  'limits of another process': (302, 1, 7, 0, 0),
  'ioctl TIOCSTI': (16, 0, (1 << 32) | 0x5412, b'x'),
  'a call that nobody has reviewed': (511,),
}
_CALL = r"""
import ctypes, json, os, sys
call = ctypes.CDLL(None, use_errno=True).syscall
call.restype = ctypes.c_long
for name, (number, *arguments) in eval(sys.argv[1]).items():
  values = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a)
            for a in arguments]
  ctypes.set_errno(0)
  result = call(ctypes.c_long(number), *values)
  error = ctypes.get_errno()
  if result >= 0 or error not in (1, 38, 93, 97):  # EPERM, ENOSYS, E..NOSUPPORT
    print(f'{name}: {result} {os.strerror(error)}')
"""
_FOREIGN = r"""
import ctypes, mmap, sys
if sys.argv[1] == 'x32':
  print(ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 39)))
else:
  code = mmap.mmap(-1, 4096, prot=7)
  code.write(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')  # mov eax, 20; int 0x80; ret
  address = ctypes.addressof(ctypes.c_char.from_buffer(code))
  print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""


async def system_calls(host: sandbox.Host) -> None:
  """Calls that no ordinary command needs are denied; another architecture's kill."""
  files = {'call.py': _CALL.encode(), 'foreign.py': _FOREIGN.encode()}
  async with await sandbox.create(host=host, contents=files) as box:
    result = await box.exec(f'python3 call.py "{_CALLS!r}"')
    assert (result.returncode, result.stdout) == (0, ''), result
    for architecture in ('x32', 'i386'):
      result = await box.exec(f'python3 foreign.py {architecture}')
      assert (result.returncode, result.stdout) == (159, ''), result  # SIGSYS


_ORDINARY = {
  'sh': 'sh -c "echo 42"',
  'sh again': 'echo 42 > /dev/stdout',
  'sed': 'echo 41 | sed s/1/2/',
  'awk': "awk 'BEGIN { print 42 }'",
  'git': 'git init -q r; cd r; git config user.email a@b; git config user.name a; '
  'echo x > f; git add f; git commit -qm m; git log --oneline | wc -l | sed s/1/42/',
  'gcc': "printf 'int main() { return 42; }' | gcc -xc - -o a; ./a; echo $?",
  'tar': 'echo 42 > f; tar c f | tar xO',
  'perl': "perl -e 'print 42'",
  'python3': (
    'python3 -c "import concurrent.futures as c, multiprocessing as m, subprocess as s,'
    "tempfile as t; p = m.get_context('fork').Pool(2); p.map(str, range(9)); "
    "c.ThreadPoolExecutor().submit(int).result(); t.TemporaryFile().write(b'x'); "
    "print(s.run(['echo', '42'], capture_output=True, text=True).stdout)\""
  ),
}


async def ordinary(host: sandbox.Host) -> None:
  """No attack: what agents use, where the machine has it, works under the filter."""
  async with await sandbox.create(host=host, contents={}) as box:
    for program, command in _ORDINARY.items():
      if (await box.exec(f'command -v {program.split()[0]}')).returncode == 0:
        result = await box.exec(command)
        assert result.stdout.strip() == '42', (program, result)


async def odd_commands(host: sandbox.Host) -> None:
  """A command may begin with what bash would take for an option."""
  async with await sandbox.create(host=host) as box:
    for command in ('-c "echo no"', '+x', '--version', '-', '--'):
      result = await box.exec(command)
      assert result.returncode == 127 and 'not found' in result.stderr, result
    await box.exec('printf "#!/bin/sh\\necho ran" > -x; chmod 755 -- -x')
    assert (await box.exec('PATH=. ; -x')).stdout == 'ran\n'


def host_of(name: str, **options) -> sandbox.Host:
  """The host of an attack; some need a supervisor that they start without a filter."""
  return sandbox.Host(parallel_execs=31 if name in WITHOUT_FILTER else 32, **options)


async def _main(names: list[str]) -> None:
  for name in names:
    error = ''
    try:
      await globals()[name](host_of(name))
    except Exception:
      error = traceback.format_exc()
    print(json.dumps([name, error]), flush=True)
  await sandbox.shutdown()


if __name__ == '__main__':
  assert os.geteuid() != 0
  asyncio.run(_main(sys.argv[1:]))
