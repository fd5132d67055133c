"""The experimental backend that runs commands in gVisor."""

from __future__ import annotations

import os
import socket
import tempfile

import pytest

from m2jax import sandbox
from m2jax.sandbox import unavailable

from . import test_listening

_MIB = 1 << 20
_installed = pytest.mark.skipif(
  not unavailable.runsc(), reason='no runsc: apt-get install runsc'
)


@pytest.fixture
def gvisor(make):
  """Makes sandboxes with this backend."""
  return lambda **kwargs: make(backend='gvisor', **kwargs)


@_installed
def test_files_persist_and_nothing_else_does(run, gvisor):
  """The contract of the other backends: files in, output and exit code, files out."""
  box = gvisor(contents={'f': b'a\nb\n'}, env={'GIVEN': "yes 'it' is"})
  command = 'wc -l f; echo "$GIVEN"; echo oops >&2; echo made > h; X=1; sleep 60 &'
  result = run(box.exec(f'touch /tmp/a /dev/shm/a; {command} exit 3'))
  assert (result.returncode, result.stderr) == (3, 'oops\n')
  assert result.stdout == "2 f\nyes 'it' is\n"
  assert run(box.read('h')) == b'made\n'
  run(box.write('h', b'changed\n'))
  result = run(box.exec('cat h; echo /tmp/* /dev/shm/* * "[$X]" /proc/[0-9]*'))
  assert result.stdout == 'changed\n/tmp/* /dev/shm/* f h [] /proc/1\n'
  assert run(box.exec('kill -TERM $$')).returncode == 143
  assert run(box.exec('exit 128')).returncode == 128  # that of runsc, if it fails


@_installed
def test_nothing_of_the_machine_is_seen(run, gvisor):
  """Another kernel, no network, no files, processes or users of the machine."""
  box = gvisor()
  with (
    socket.create_server(('127.0.0.1', 0)) as server,
    tempfile.NamedTemporaryFile(dir='/tmp') as secret,
  ):
    port = server.getsockname()[1]
    attacks = (
      f'exec 3<>/dev/tcp/127.0.0.1/{port}',
      f'cat {secret.name}',
      f'[ -e /proc/{os.getpid()}/comm ]',
      'touch /usr/x',
      'touch /etc/x',
      'touch /x',
      f'[ "$(uname -r)" = {os.uname().release} ]',
      '[ $(id -u) != 1000 ]',
      'mount -t tmpfs none /workspace',
    )
    tried = '; '.join(f'({a}) 2>/dev/null && echo {a!r}' for a in attacks)
    assert run(box.exec(f'{tried}; touch mine')).stdout == ''
  uid = (box.workspace / 'mine').stat().st_uid
  assert uid != 0 if os.geteuid() == 0 else uid == os.geteuid()


@_installed
def test_limits_stop_commands(run, gvisor):
  """Elapsed and CPU time, output, size of files; the sandbox lives on."""
  limits = sandbox.Limits(cpu_s=1, output_bytes=100, file_bytes=_MIB)
  box = gvisor(limits=limits)
  result = run(box.exec('echo begun > kept; sleep 9', 2.0))
  assert (result.returncode, result.timed_out) == (124, True)
  assert run(box.read('kept')) == b'begun\n'
  assert run(box.exec('while :; do :; done')).returncode in (137, 152)
  result = run(box.exec('head -c 1000 /dev/zero; head -c 2M /dev/zero > big'))
  assert (len(result.stdout), result.truncated) == (100, True)
  assert (box.workspace / 'big').stat().st_size == _MIB


@_installed
def test_no_command_fails_for_the_sandbox(run, gvisor):
  """What takes gVisor's memory, space or threads is no failure that is masked."""
  small = sandbox.Limits(memory_bytes=96 * _MIB, processes=4, workspace_bytes=_MIB)
  box = gvisor(limits=small)
  longest = 'echo fine #'.ljust(119_000, '\1')
  assert run(box.exec(longest)).stdout == 'fine\n'
  if box.supervisor_facts['cgroups'] == 'none':
    pytest.skip('no control groups')
  result = run(box.exec('head -c 200M /dev/zero | tail -c 190M'))
  assert (result.returncode, result.oom) == (137, True)
  forks = 'unshare -Ur bash -c "for i in {1..99}; do sleep 9 & done"'  # not its limit
  assert run(box.exec(forks)).returncode not in (0, 124)
  assert run(box.exec('echo fine')).stdout == 'fine\n'


@_installed
def test_snapshot_and_restore(run, gvisor):
  """The next command sees what was restored, modes and links included."""
  box = gvisor(contents={'d/f': b'1'})
  seen = "find . -printf '%p %m %U %l\\n' | sort; cat link"
  run(box.exec('chmod 750 d; chmod 600 d/f; ln -s d/f link; mkdir -m 500 locked'))
  before = run(box.exec(seen))
  assert './d/f 600 1000' in before.stdout
  snapshot = run(box.snapshot())
  run(box.exec('rm -rf d link; mkdir -p x/y; chmod 000 x; echo 2 > new; chmod 0 .'))
  run(box.restore(snapshot))
  assert run(box.exec(seen)).stdout == before.stdout


@_installed
def test_a_sandbox_reaches_its_own_listener(run, gvisor):
  """A black-box agent's way out; its network has nothing else."""
  box, heard = gvisor(), []

  async def ask():
    server = await test_listening.served(await box.listen(8080), 'a', heard)
    # This runsc fails a read of its host's sockets with EAGAIN where it should wait.
    ask = test_listening.ASK.format(word='x').replace('head', 'until head')
    result = await box.exec(f'{ask}; do sleep 0.01; done')
    names = await box.exec("cut -d: -f1 -s /proc/net/dev | tr -d ' '")
    server.close()
    return result.stdout, names.stdout

  assert run(ask()) == ('a\n', 'lo\n')
  assert heard == [('a', 'x')]


@_installed
@pytest.mark.long
def test_what_holds_is_measured(run):
  """The one limit that a command can exceed is reported."""
  found = run(sandbox.capabilities('gvisor'))
  assert all(found.isolation.values()), found
  broken = {name for name, mechanism in found.limits.items() if not mechanism}
  assert broken == {'processes'}


def test_without_runsc_it_says_what_to_install(run, monkeypatch):
  """The error has the command, and a program that is not runsc is no sandbox."""
  host = sandbox.Host(parallel_execs=11)  # a supervisor of its own
  monkeypatch.setattr(unavailable, 'runsc', lambda: '')
  with pytest.raises(sandbox.SandboxUnavailable, match='no runsc') as error:
    run(sandbox.create(backend='gvisor', host=host))
  assert error.value.fix.endswith('apt-get install -y runsc')
  monkeypatch.setattr(unavailable, 'runsc', lambda: '/bin/false')
  with pytest.raises(sandbox.SandboxUnavailable):
    run(sandbox.create(backend='gvisor', host=host))
