"""What sandboxes promise, whatever runs them: the same tests for each backend."""

from __future__ import annotations

import asyncio

import pytest

from m2jax import sandbox

_BACKENDS = ('namespaces', pytest.param('podman', marks=pytest.mark.long))


@pytest.fixture(params=_BACKENDS)
def box(request, make):
  """Makes a sandbox of each backend, with some limits."""

  def box(**limits):
    options = dict(wall_s=20.0, processes=40)
    more = {}
    if request.param != 'namespaces':
      more['image'] = request.getfixturevalue('image')
    chosen = sandbox.Limits(**{**options, **limits})
    return make(backend=request.param, limits=chosen, **more)

  return box


def test_a_command_has_its_output_and_its_status(box, run):
  tested = box()
  result = run(tested.exec('echo out; echo err >&2; exit 125'))
  assert (result.returncode, result.stdout, result.stderr) == (125, 'out\n', 'err\n')
  assert run(tested.exec('kill -9 $$')).returncode == 137
  assert run(tested.exec('kill -9 $PPID; exit 3')).returncode in (3, 137)


def test_files_outlast_a_command(box, run):
  tested = box()
  run(tested.write('deep/inside/a', b'\0one'))
  assert run(tested.exec('cat deep/inside/a > b && printf two >> b')).returncode == 0
  assert run(tested.read('b')) == b'\0onetwo'
  assert (tested.workspace / 'b').read_bytes() == b'\0onetwo'
  with pytest.raises(FileNotFoundError):
    run(tested.read('none'))


def test_reading_follows_no_link_and_opens_no_pipe(box, run):
  tested = box()
  run(
    tested.exec(
      'ln -s /etc/shadow l; ln -s / d; mkfifo p; mkdir e; ln -s d/etc/passwd m'
    )
  )
  for path in ('l', 'd/etc/hostname', 'p', 'e', 'm', '../x', 'd/../../x'):
    with pytest.raises(sandbox.SandboxPathError):
      run(tested.read(path))
  with pytest.raises(sandbox.SandboxPathError):
    run(tested.write('d/new', b''))
  run(tested.write('l', b'mine'))  # the link itself is replaced
  assert run(tested.read('l')) == b'mine'


def test_reading_is_bounded(box, run):
  tested = box(file_bytes=1 << 20, workspace_bytes=2 << 20)
  run(tested.exec('head -c 4M /dev/zero > big'))
  with pytest.raises(sandbox.SandboxPathError, match='larger'):
    run(tested.read('big', 1000))
  assert len(run(tested.read('big'))) <= 1 << 20  # RLIMIT_FSIZE


def test_output_is_bounded(box, run):
  tested = box(output_bytes=1000)
  result = run(tested.exec('printf %05000d 1; printf %05000d 2 >&2'))
  assert (len(result.stdout), len(result.stderr)) == (1000, 1000)
  assert result.truncated and result.returncode == 0
  result = run(tested.exec('while :; do printf %01000d 1; done'))
  assert result.returncode == 137 and result.truncated and not result.timed_out


def test_a_timeout_kills_everything(box, run):
  tested = box()
  result = run(tested.exec('(setsid sleep 300; echo x > late) & sleep 300', 0.5))
  assert result.timed_out and result.returncode == 124
  assert 'sleep' not in _programs(tested, run)
  with pytest.raises(FileNotFoundError):
    run(tested.read('late'))


def _programs(tested, run) -> str:
  """Names of its processes but the main one and its child."""
  count = 'for p in /proc/[0-9]*; do read a b c d e < $p/stat; echo "$d $b"; done'
  lines = run(tested.exec(count)).stdout.splitlines()
  return '\n'.join(line for line in lines if line != '1 (sleep)')


def test_cancellation_kills_the_command(box, run):
  tested = box()

  async def cancelled():
    task = asyncio.ensure_future(tested.exec('echo > begun; sleep 300; echo > late'))
    while not (tested.workspace / 'begun').exists():
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return await tested.exec('echo next')

  assert run(cancelled()).stdout == 'next\n'
  assert 'sleep' not in _programs(tested, run)


def test_cancellation_before_the_start_leaves_nothing(box, run):
  tested = box()

  async def cancelled():
    task = asyncio.ensure_future(tested.exec('sleep 300'))
    await asyncio.sleep(0)  # it has begun to ask for the command
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return await tested.exec('echo next')

  assert run(cancelled()).stdout == 'next\n'
  assert 'sleep' not in _programs(tested, run)


def test_destroying_ends_a_running_command(box, run):
  tested = box()

  async def destroyed():
    task = asyncio.ensure_future(tested.exec('echo > begun; sleep 300'))
    while not (tested.workspace / 'begun').exists():
      await asyncio.sleep(0.01)
    await tested.destroy()
    assert (await task).returncode == 137
    with pytest.raises(sandbox.SandboxError, match='destroyed'):
      await tested.exec('true')

  run(destroyed())


def test_a_fork_bomb_is_the_commands_failure(box, run):
  tested = box(processes=20)
  result = run(tested.exec('f() { f | f & }; f; sleep 1', 5.0))
  assert isinstance(result, sandbox.ExecResult)
  # In a container its processes may still be ending.
  alive = (run(tested.exec('echo alive')).stdout == 'alive\n' for _ in range(20))
  assert any(alive)


def test_memory_is_limited(box, run):
  tested = box(memory_bytes=64 << 20)
  result = run(tested.exec('head -c 300M /dev/zero | tail -c 290M | wc -c; exit 7'))
  assert '304087040' not in result.stdout
  assert result.oom and result.returncode == 7


def test_a_listener_is_reached_from_inside_alone(box, run):
  tested = box()

  async def asked():
    loop = asyncio.get_running_loop()
    with await tested.listen(8123) as listener:
      listener.setblocking(False)
      command = 'exec 3<>/dev/tcp/127.0.0.1/8123 && printf ping >&3 && cat <&3'
      task = asyncio.ensure_future(tested.exec(command))
      connection, _ = await loop.sock_accept(listener)
      with connection:
        asked = await loop.sock_recv(connection, 4)
        await loop.sock_sendall(connection, b'pong')
      with pytest.raises(ConnectionRefusedError):  # not of this machine's network
        await asyncio.open_connection('127.0.0.1', 8123)
      with pytest.raises(sandbox.SandboxError):
        await tested.listen(8123)  # in use
      return asked, (await task).stdout

  assert run(asked()) == (b'ping', 'pong')


def test_it_has_no_network(box, run):
  result = run(box().exec('exec 3<>/dev/tcp/1.1.1.1/53'))
  assert result.returncode != 0 and not result.timed_out


def test_a_snapshot_is_restored(box, run):
  tested = box()
  run(tested.exec('mkdir d; echo 1 > d/a; chmod 600 d/a; ln -s a d/l'))
  snapshot = run(tested.snapshot())
  run(tested.exec('rm -r d; echo 2 > b'))
  run(tested.restore(snapshot))
  words = 'cat d/l && [ ! -e b ] && stat -c "%a %U" d/a && echo 3 > d/a'
  result = run(tested.exec(words))
  assert result.returncode == 0 and result.stdout.startswith('1\n600 ')
  with pytest.raises(sandbox.SandboxError):
    run(tested.restore(b'not one'))
  assert run(tested.read('d/a')) == b'3\n'
