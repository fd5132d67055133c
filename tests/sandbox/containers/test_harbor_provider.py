"""Harbor's environments as sandboxes: with Harbor where it is, else its interface."""

from __future__ import annotations

import asyncio

import pytest

from m2jax import sandbox
from m2jax.sandbox import containers
from tests.sandbox.containers.local_environment import Local

_BACKEND = f'harbor:{Local.__module__}:Local'


@pytest.fixture
def box(tmp_path):
  """Runs a function with a sandbox in a directory."""

  def box(work, **limits):
    async def run():
      container = containers.Container('debian:12', workdir=str(tmp_path))
      options = dict(backend=_BACKEND, image=container, limits=sandbox.Limits(**limits))
      async with await sandbox.create(**options) as made:
        return await work(made)

    return asyncio.run(run())

  return box


def test_commands_and_files(box, tmp_path):
  async def work(made):
    await made.write('d/a', b'\0' + b'1' * 200_000)
    await made.copy_in({'b': b'2', 'e/c': b'3'}, 'd')
    result = await made.exec('wc -c < d/a; cat d/b d/e/c; echo err >&2; exit 125')
    assert (result.returncode, result.stdout) == (125, '200001\n23')
    assert result.stderr == 'err\n' and not result.timed_out
    assert (await made.exec('kill -9 $$')).returncode == 137
    assert await made.read(tmp_path / 'd/a') == b'\0' + b'1' * 200_000
    await made.exec('ln -s /etc/passwd l; ln -s /etc d/etc; mkfifo p; rm d/a')
    found = await made.copy_out(tmp_path / 'd')
    assert found == {'b': b'2', 'e/c': b'3'}
    for path in ('l', 'p', 'd'):
      with pytest.raises(sandbox.SandboxPathError):
        await made.read(tmp_path / path)
    with pytest.raises(FileNotFoundError):
      await made.read(tmp_path / 'none')
    with pytest.raises(sandbox.SandboxPathError, match='larger'):
      await made.read(tmp_path / 'd/b', 0 or 1) and await made.copy_out(tmp_path, 1)

  box(work)


def test_output_and_time_are_bounded(box):
  async def work(made):
    result = await made.exec('head -c 100000 /dev/zero; echo err >&2')
    assert len(result.stdout) == 1000 and result.truncated
    result = await made.exec('sleep 300', 0.3)
    assert result.returncode == 124 and result.timed_out
    # What stays in the background does not hold the result up.
    assert (await made.exec('sleep 3 & echo back')).stdout == 'back\n'

  box(work, output_bytes=1000)


def test_a_providers_failure_is_not_a_result(box, monkeypatch):
  async def work(made):
    monkeypatch.setattr(Local, 'fails', {'exec', 'upload'})
    with pytest.raises(sandbox.SandboxError, match='provider is gone'):
      await made.exec('true')
    with pytest.raises(sandbox.SandboxError):
      await made.copy_in({'a': b''})
    for missing in (made.kill_processes(), made.listen(80), made.commit()):
      with pytest.raises(sandbox.SandboxError):
        await missing

  box(work)
  monkeypatch.setattr(Local, 'fails', {'start'})
  with pytest.raises(sandbox.SandboxError, match='provider is gone'):
    box(work)
  assert not Local.made[-1].root.exists()


def test_the_environment_gets_the_image_without_a_network(box):
  async def work(made):
    options = Local.made[-1].options
    assert options['task_env_config'].docker_image == 'debian:12'
    assert options['task_env_config'].memory_mb == 512
    assert options['network_policy'].network_mode == 'no-network'

  box(work)


def test_an_unknown_provider_is_unavailable():
  with pytest.raises(sandbox.SandboxUnavailable, match='nosuch'):
    asyncio.run(sandbox.create(backend='harbor:nosuch', image='debian:12'))


def test_commands_that_no_shell_can_be_given(box):
  """They are the command's failure, as in every sandbox; a wrong time is an error."""

  async def work(made):
    for command, words in (('echo \0', 'NUL byte'), ('#' * 120_001, 'longer than')):
      result = await made.exec(command)
      assert result.returncode == 126 and words in result.stderr
    with pytest.raises(ValueError, match='timeout_s'):
      await made.exec('true', 0)

  box(work)
