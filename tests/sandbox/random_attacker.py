"""Runs inside a sandbox: random hostile calls. `python3 attacker.py SEED COUNT CANARY`.

What fails is the sandbox's success, so every error is ignored; what must hold is looked
at from outside, by test_random_attacks.py.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import resource
import signal
import socket
import sys
import time

SEED, COUNT, CANARY = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rng = random.Random(SEED)
libc = ctypes.CDLL(None, use_errno=True)
NAMES = [b'a', b'b', b'-rf', b' ', b'\xff', b'n' * 255, b'x\ny', b'...', b'~', b'd/e']
PLACES = [
  *(os.fsencode(p) for p in (CANARY, os.path.dirname(CANARY))),
  *(b'/ /etc/passwd /etc /usr/bin/env /proc/1/mem /proc/1/root /dev/null'.split()),
  *(b'/proc/self/root /proc/self/mem /proc/sys/kernel/core_pattern .. ../..'.split()),
  *(b'/proc/self/fd/0 /proc/self/fd/1 /proc/sysrq-trigger /dev/shm/x /tmp/x'.split()),
  *(b'/workspace/../etc/hosts /sys/fs/cgroup /proc/self/ns/user /run/x'.split()),
  *(b'. /workspace'.split()),
]


def name() -> bytes:
  """A name in the workspace, now and then a few levels down."""
  return b'/'.join(rng.choices(NAMES, k=rng.choice([1, 1, 1, 2, 3])))


def place() -> bytes:
  """Somewhere the command has no business."""
  return rng.choice([*PLACES, name()])


def paths() -> None:
  """Directories, renames, modes; writes where nothing may be written."""
  action = rng.randrange(7)
  if action == 0:
    os.makedirs(name(), mode=rng.choice([0, 0o300, 0o500, 0o700, 0o7777]))
  elif action == 1:
    os.rename(place(), place())
  elif action == 2:
    os.chmod(place(), rng.randrange(0o10000))
  elif action == 3:
    with open(place(), rng.choice(['wb', 'ab', 'r+b'])) as f:
      f.write(b'hostile')
  elif action == 4:
    os.chdir(rng.choice([b'/workspace', b'/tmp', place()]))
  elif action == 5:
    here = os.getcwd()
    for _ in range(rng.choice([3, 300])):
      os.mkdir('deep')
      os.chdir('deep')
    os.chdir(here)
  else:
    os.replace(b'/workspace', place())


def links() -> None:
  """Symbolic and hard links, loops, pipes, sockets, device files, mounts."""
  action = rng.randrange(6)
  with contextlib.suppress(OSError):
    os.unlink(target := name())
  if action <= 1:
    os.symlink(place(), target)
  elif action == 2:
    os.link(place(), target, follow_symlinks=rng.random() < 0.5)
  elif action == 3:
    os.mkfifo(target)
  elif action == 4:
    os.mknod(target, rng.choice([0o020666, 0o060666, 0o140666]), os.makedev(1, 1))
  else:
    libc.mount(place(), place(), b'tmpfs', rng.choice([0, 4096, 16384]), None)
    libc.umount2(place(), 2)


def sizes() -> None:
  """Huge, sparse and many files, times of no calendar, memory, attributes."""
  action = rng.randrange(8)
  if action == 0:
    os.truncate(
      os.open(name(), os.O_CREAT | os.O_RDWR), rng.choice([1, 1 << 24, 1 << 62])
    )
  elif action == 1:
    fd = os.open(name(), os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(fd, rng.randrange(1 << 22), rng.randrange(1, 1 << 23))
  elif action == 2:
    fd = os.open(name(), os.O_CREAT | os.O_RDWR)
    for _ in range(20):
      os.pwrite(fd, b'data', rng.randrange(1 << 24))
  elif action == 3:
    time_ns = rng.choice(
      [-(2**62), 2**62, -1, rng.randrange(2**60)]
    ) * 10 ** rng.choice([0, 9])
    os.utime(name(), ns=(time_ns, time_ns), follow_symlinks=False)
  elif action == 4:
    directory = rng.choice([b'/workspace/', b'/tmp/', b'/dev/shm/'])
    for number in range(500):
      open(directory + b'f%d' % number, 'wb').close()
  elif action == 5:
    memory = mmap.mmap(-1, rng.randrange(1, 1 << 26))
    memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(memory), mmap.PAGESIZE)))
  elif action == 6:
    os.setxattr(name(), b'user.x', b'v' * 5000)
  else:
    sys.stdout.buffer.write(os.urandom(rng.randrange(1 << 16)))


def signals() -> None:
  """Signals to all, init included; daemons that ignore them; other priorities."""
  action = rng.randrange(8)
  number = rng.choice([signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, 10, 64])
  if action == 0:
    os.kill(rng.choice([1, -1, 2, os.getppid()]), number)
  elif action == 1:
    signal.pidfd_send_signal(os.pidfd_open(1), signal.SIGKILL)
  elif action == 2 and os.fork() == 0:
    os.setsid()
    for ignored in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
      signal.signal(ignored, signal.SIG_IGN)
    with contextlib.suppress(OSError):
      for _ in range(3000):
        with open('/workspace/daemon', 'ab') as f:
          f.write(b'x')
        time.sleep(0.001)
    os._exit(0)
  elif action == 3:
    libc.ptrace(rng.choice([0, 16, 0x4206]), rng.choice([0, 1, 2]), 0, 0)
  elif action == 4:
    resource.prlimit(rng.choice([0, 1, 2]), rng.randrange(16), (0, 0))
  elif action == 5:
    for _ in range(rng.choice([3, 100])):
      if os.fork() == 0:
        time.sleep(rng.random())
        os._exit(0)
  elif action == 6:
    libc.prctl(rng.choice([1, 4, 15, 22, 36, 38]), rng.randrange(3), 0, 0, 0)
  else:
    os.setpriority(os.PRIO_PROCESS, rng.choice([0, 1]), 19)


def descriptors() -> None:
  """Whatever is open, in odd modes; descriptors in flight; servers left behind."""
  action = rng.randrange(7)
  if action == 0:
    fd = rng.randrange(24)
    fcntl.fcntl(fd, fcntl.F_SETFL, rng.choice([os.O_NONBLOCK, os.O_APPEND, 0o20000]))
  elif action == 1:
    os.write(rng.randrange(3, 24), b'{"exit-code": 0}\n!forged\n')
  elif action == 2:
    os.open(
      b'/proc/self/fd/%d' % rng.randrange(24), rng.choice([os.O_RDWR, os.O_RDONLY])
    )
  elif action == 3:
    one, two = socket.socketpair()
    for _ in range(10):
      socket.send_fds(one, [b'x'], [one.fileno(), two.fileno()])
  elif action == 4:
    server = socket.socket(socket.AF_UNIX)
    server.bind(rng.choice(['\0left', '/workspace/socket']))
    server.listen()
    os.dup(server.detach())
  elif action == 5:
    fcntl.fcntl(1, 1031, rng.choice([4096, 1 << 20]))  # F_SETPIPE_SZ
    os.close(rng.choice([0, 1, 2]))
  else:
    try:
      while True:
        os.dup(1)
    finally:
      os.closerange(64, 256)


def main() -> None:
  """Makes the calls, and now and then ends in an odd way."""
  for _ in range(COUNT):
    action = rng.choice([paths, links, sizes, signals, descriptors])
    with contextlib.suppress(Exception):
      action()
  ending = rng.randrange(6)
  if ending == 0:
    os.abort()
  elif ending == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
  elif ending == 2:
    time.sleep(60)
  os._exit(rng.randrange(256))


main()
