"""Containers beyond what every sandbox promises: users, images, attacks, the end."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from m2jax import sandbox
from m2jax.sandbox import containers
from m2jax.sandbox.containers import enforcement, engines, images, owners

pytestmark = pytest.mark.long
_LIMITS = sandbox.Limits(wall_s=20.0, processes=40)


@pytest.fixture
def box(make, image):
  def box(limits=_LIMITS, **options):
    container = containers.Container(image, **options)
    return make(backend='podman', image=container, limits=limits)

  return box


def _names(podman) -> list[str]:
  words = ['podman', 'ps', '--all', '--format', '{{.Names}}']
  return subprocess.run(
    words, env=podman, capture_output=True, text=True
  ).stdout.split()


def test_root_in_it_is_nobody_outside(box, run):
  tested = box()
  result = run(tested.exec('echo > f; echo $(id -u); chown 5 f; cat /proc/self/status'))
  words = dict(
    line.split(':\t', 1) for line in result.stdout.splitlines() if ':\t' in line
  )
  assert result.stdout.startswith('0\n')
  assert (tested.workspace / 'f').stat().st_uid == 300_005
  allowed = sum(1 << bit for bit in enforcement._CAPABILITIES.values())
  assert int(words['CapEff'], 16) & ~allowed == 0
  assert (words['NoNewPrivs'], words['Seccomp']) == ('1', '2')


def test_commands_and_files_have_the_user(box, run):
  tested = box(user='agent', workdir='/app')
  run(tested.write('mine/a', b'1'))
  words = 'id -u; stat -c %u mine mine/a; echo 2 > mine/a; echo > /etc/x || echo denied'
  assert run(tested.exec(words)).stdout == '1000\n1000\n1000\ndenied\n'
  assert (
    run(tested.exec('id -u; pwd', user='root', workdir='/etc')).stdout == '0\n/etc\n'
  )
  assert run(tested.exec('echo $A', env={'A': 'b c'})).stdout == 'b c\n'


def test_what_a_command_breaks_is_its_own_failure(box, run):
  tested = box()
  for command in ('rm /usr/bin/sh /usr/bin/bash', 'true', 'true'):
    assert isinstance(run(tested.exec(command)), sandbox.ExecResult)
  tested = box(workdir='/app')
  for command in ('cd /; rm -r /app', 'true'):
    result = run(tested.exec(command))
  assert result.returncode == 126
  with pytest.raises(FileNotFoundError):
    _ = tested.workspace


def test_ending_the_container_is_the_commands_failure(box, run):
  tested = box()
  run(tested.exec('rm /usr/bin/sleep'))
  run(tested.kill_processes())  # the main process ends without it
  for _ in range(2):
    result = run(tested.exec('echo x'))
    assert (result.returncode, result.stdout) == (137, '')
  assert run(tested.read('/etc/passwd'))


@pytest.mark.parametrize('status', [1, 125])
def test_a_shell_that_the_agent_made_is_its_own_failure(box, run, status):
  tested = box()
  shell = f'rm /usr/bin/sh; printf "#!/usr/bin/bash\\nexit {status}" > /usr/bin/sh'
  run(tested.exec(f'{shell}; chmod +x /usr/bin/sh'))
  assert run(tested.exec('true')).returncode == 137


def test_variables_of_this_process_are_not_seen(image, make, run, monkeypatch):
  monkeypatch.setitem(engines.environment(), 'HTTP_PROXY', 'http://user:secret@proxy')
  tested = make(backend='podman', image=image, limits=_LIMITS)
  assert 'secret' not in run(tested.exec('env')).stdout


def test_an_engine_that_fails_is_not_a_result(box, run, podman):
  tested = box()
  command = ['podman', 'rm', '--force', '--time', '0', tested._live.name]
  subprocess.run(command, env=podman, capture_output=True, check=True)
  with pytest.raises(sandbox.SandboxError):
    run(tested.exec('true'))


def test_a_process_that_outlives_its_command_ends_before_judging(box, run):
  tested = box()
  loop = '(while :; do echo x >> late; sleep 0.01; done) >/dev/null 2>&1 & echo back'
  result = run(tested.exec(f'setsid nohup bash -c "{loop}"'))
  assert result.stdout == 'back\n'
  run(tested.kill_processes())
  before = (tested.workspace / 'late').stat() if _has(tested, 'late') else None
  run(tested.exec('sleep 0.2'))
  assert before == ((tested.workspace / 'late').stat() if before else None)


def _has(tested, name: str) -> bool:
  return (tested.workspace / name).exists()


def test_copying_out_is_bounded_and_follows_no_link(box, run):
  tested = box()
  run(tested.copy_in({'a': b'1', 'd/b': b'22'}, '/work'))
  run(tested.exec('cd /work; ln -s /etc etc; mkfifo p; ln a d/hard; ln -s a l'))
  assert run(tested.copy_out('/work')) == {'a': b'1', 'd/b': b'22', 'd/hard': b'1'}
  with pytest.raises(sandbox.SandboxPathError, match='larger'):
    run(tested.copy_out('/work', 2))
  run(tested.exec("bash -c 'cd /work; head -c 1 /dev/zero > s'"))
  with pytest.raises(sandbox.SandboxPathError):
    run(tested.copy_out('/proc'))
  with pytest.raises(sandbox.SandboxPathError):
    run(tested.copy_out('/work/etc'))


def test_copying_in_takes_no_links_of_this_machine(box, run, tmp_path):
  (tmp_path / 'run.sh').write_text('echo ran')
  (tmp_path / 'run.sh').chmod(0o755)
  (tmp_path / 'link').symlink_to('/etc/passwd')
  tested = box()
  run(tested.copy_in(tmp_path, '/in'))
  assert run(tested.exec('ls /in; /in/run.sh')).stdout == 'run.sh\nran\n'


def test_files_of_this_machine_and_of_others_are_out_of_reach(box, run, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('x')
  one, other = box(), box()
  run(one.write('/tmp/mine', b'1'))
  for command in (f'cat {secret}', 'cat /tmp/mine', 'cat /proc/1/root/tmp/mine'):
    assert run(other.exec(command)).returncode != 0
  words = f'ls /proc/{os.getpid()}/root; echo 1 > /proc/sys/vm/drop_caches'
  result = run(other.exec(words))
  assert result.returncode and not result.stdout


def test_read_only_directories_are_read_only(box, run, tmp_path):
  tmp_path.chmod(0o755)
  (tmp_path / 'f').write_text('1')
  tested = box(read_only=((str(tmp_path), '/given'),))
  assert run(tested.exec('cat /given/f; echo 2 > /given/f')).stdout == '1'
  assert (tmp_path / 'f').read_text() == '1'


def test_sandboxes_run_at_the_same_time(box, run):
  one, other = box(), box()

  async def both():
    # Each waits for a file that the test writes when both have begun.
    wait = 'echo > begun; while [ ! -e go ]; do sleep 0.02; done'
    tasks = [asyncio.ensure_future(tested.exec(wait)) for tested in (one, other)]
    for tested in (one, other):
      while not _has(tested, 'begun'):
        await asyncio.sleep(0.01)
    for tested in (one, other):
      (tested.workspace / 'go').touch()
    return [(await task).returncode for task in tasks]

  assert run(both()) == [0, 0]


def test_a_commit_is_the_start_of_another(box, run, make):
  tested = box(user='agent', workdir='/app')
  run(tested.exec('echo 1 > /tmp/f; rm /usr/bin/touch', user='root'))
  run(tested.exec('echo 2 > /tmp/g'))
  name = run(tested.commit())
  other = make(backend='podman', image=name, limits=_LIMITS)
  words = (
    'cat /tmp/f; stat -c "%u %n" /tmp/f /tmp/g; [ -e /usr/bin/touch ] || echo none'
  )
  assert run(other.exec(words)).stdout == '1\n0 /tmp/f\n1000 /tmp/g\nnone\n'


_OWNER = """
import asyncio, os, signal, sys
from m2jax import sandbox
async def main():
  await sandbox.create(backend='podman', image=sys.argv[1])
  if sys.argv[2] == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.parametrize('how', ('exit', 'kill'))
def test_containers_do_not_outlive_their_process(run, image, podman, how):
  before = set(_names(podman))
  words = [sys.executable, '-c', _OWNER, image, how]
  root = pathlib.Path(sandbox.__file__).parents[2]
  done = subprocess.run(words, env=podman, cwd=root, capture_output=True, text=True)
  assert done.returncode == (-signal.SIGKILL if how == 'kill' else 0), done.stderr
  left = set(_names(podman)) - before
  assert len(left) == (how == 'kill')
  run(owners.sweep('podman'))
  assert set(_names(podman)) == before


def test_containers_of_the_living_and_of_others_stay(box, run, podman, image):
  tested = box()
  other = 'm2jax-mine'
  words = ['podman', 'create', '--name', other, '--ulimit', 'nofile=99:99', image, 'sh']
  subprocess.run(words, env=podman, capture_output=True, check=True)
  run(owners.sweep('podman'))
  assert {tested._live.name, other} <= set(_names(podman))
  assert not owners.is_dead(owners.new_name())
  assert owners.is_dead('m2jax-0000-1-1-1-00')


def test_what_is_not_enforced_is_no_sandbox(box, monkeypatch):
  honest = enforcement.options

  def without_limits(*arguments):
    made = honest(*arguments)
    at = made.index('--pids-limit')
    return [*made[:at], *made[at + 2 :]]

  monkeypatch.setattr(enforcement, 'options', without_limits)
  with pytest.raises(sandbox.SandboxUnavailable, match='processes'):
    box()


def test_the_report_says_what_holds(run, image):
  found = run(
    sandbox.capabilities('podman', image=containers.Container(image, workdir='/app'))
  )
  missing = {name for name, how in found.limits.items() if how is None}
  assert missing == {'workspace_bytes'}  # and it says so
  # The engine's filter of system calls allows both; docs/security.md.
  broken = {name for name, held in found.isolation.items() if not held}
  assert broken <= {'new namespaces', 'core dump handlers'}


def test_an_image_is_needed_and_has_to_exist(run, image):
  for options in ({'backend': 'podman'}, {'backend': 'namespaces', 'image': image}):
    with pytest.raises(ValueError, match='image'):
      run(sandbox.create(**options))
  with pytest.raises(sandbox.SandboxError, match='nosuch'):
    run(sandbox.create(backend='podman', image='localhost/nosuch'))


# Images -------------------------------------------------------------------------------


def _context(place: pathlib.Path, steps: str, **files: str) -> pathlib.Path:
  place.mkdir(exist_ok=True)
  (place / 'Dockerfile').write_text(steps)
  for name, text in files.items():
    (place / name).write_text(text)
  return place


def test_an_image_is_built_once(run, image, tmp_path, make):
  steps = (
    'FROM debian:12 AS x\nWORKDIR /work\nUSER agent\nCOPY f f\nRUN echo 1 > /tmp/g\n'
  )
  context = _context(tmp_path / 'c', steps, f='1')
  options = dict(network='none', replace={'debian:12': image})

  async def several():
    built = (images.build(context, **options) for _ in range(3))
    return set(await asyncio.gather(*built))

  (name,) = run(several())
  tested = make(backend='podman', image=name, limits=_LIMITS)
  words = 'pwd; id -u; cat f; stat -c %u /tmp/g'
  assert run(tested.exec(words)).stdout == '/work\n1000\n11000\n'
  (context / 'f').write_text('2')
  assert run(images.build(context, **options)) != name


def test_a_dockerfile_that_fails_says_so(run, image, tmp_path):
  context = _context(tmp_path / 'c', f'FROM {image}\nRUN echo wrong; exit 3\n')
  with pytest.raises(images.BuildFailed, match='wrong'):
    run(images.build(context, network='none'))
  (context / 'big').write_bytes(bytes(1000))
  with pytest.raises(images.BuildFailed, match='larger'):
    run(images.build(context, network='none', max_bytes=999))
  os.mkfifo(context / 'pipe')
  with pytest.raises(images.BuildFailed, match='not a file'):
    run(images.build(context, network='none'))


def test_links_of_a_context_do_not_lead_out(run, image, tmp_path):
  (tmp_path / 'secret').write_text('secret')
  context = _context(tmp_path / 'c', f'FROM {image}\nCOPY l /l\n')
  (context / 'l').symlink_to(tmp_path / 'secret')
  with pytest.raises(images.BuildFailed):
    run(images.build(context, network='none'))


@pytest.mark.parametrize(
  'options',
  [
    '--mount=type=bind,from=s,source=/l,target=/mnt',
    '--mount=type=cache,id=../../x,target=/m --mount=target=/mnt',
    '--mo\\\n# a comment\n\nunt=type=bind,from=s,source=/l,target=/mnt',
    '--network=host',
  ],
)
def test_a_step_reaches_neither_this_machine_nor_other_builds(
  run, image, tmp_path, options
):
  """A stage whose link is mounted is this machine's root, CVE-2024-1753."""
  steps = f'FROM {image} AS s\nRUN ln -s / /l\nFROM {image}\nRUN {options} ls /mnt\n'
  context = _context(tmp_path / 'c', steps)
  with pytest.raises(images.BuildFailed, match='RUN --(mount|network) is not'):
    run(images.build(context, network='none'))


def test_a_build_without_a_network_fetches_nothing(run, image, tmp_path, monkeypatch):
  monkeypatch.setitem(engines.environment(), 'HTTP_PROXY', 'http://user:secret@proxy')
  steps = f'FROM {image}\nRUN --mount=type=cache,target=/c ! env | grep secret\n'
  assert run(images.build(_context(tmp_path / 'a', steps), network='none'))
  with socket.create_server(('127.0.0.1', 0)) as server:
    server.settimeout(0)
    url = f'http://127.0.0.1:{server.getsockname()[1]}/metrics'
    context = _context(tmp_path / 'b', f'FROM {image}\nADD {url} /x\n')
    with pytest.raises(images.BuildFailed, match='network is unreachable'):
      run(images.build(context, network='none'))
    with pytest.raises(BlockingIOError):
      server.accept()


def test_a_dockerfile_is_no_input_of_cpp(run, image, tmp_path):
  (tmp_path / 'secret').write_text('RUN echo secret\n')
  steps = f'FROM {image}\n#include "{tmp_path}/secret"\nRUN exit 3\n'
  context = _context(tmp_path / 'c', '', **{'a.in': steps})
  with pytest.raises(images.BuildFailed) as failed:
    run(images.build(context, network='none', dockerfile='a.in'))
  assert 'echo secret' not in str(failed.value)


def test_a_dockerfile_of_empty_lines_takes_no_time():
  assert images._replaced('\n' * 500_000 + 'FROM a\n', {})[1] == ['a']


def test_old_images_are_pruned_and_never_those_of_others(run, image, tmp_path, podman):
  contexts = [_context(tmp_path / n, f'FROM {image}\nCOPY f /f\n', f=n) for n in 'abc']
  old, new, used = [run(images.build(c, network='none')) for c in contexts]
  run(engines.checked('podman', 'tag', new, 'localhost/others/image:1'))
  run(images.build(contexts[1], network='none'))
  run(images.build(contexts[2], network='none'))
  words = 'image', 'inspect', '--format={{.Size}}'
  sizes = [int(run(engines.checked('podman', *words, name))) for name in (new, used)]
  gone = run(images.prune(keep_bytes=sum(sizes)))
  assert old in gone and not {new, used} & set(gone)
  assert set(run(images.prune(keep_bytes=1))) >= {new, used}
  assert run(images._id('podman', 'localhost/others/image:1'))
  assert run(images._id('podman', image))
