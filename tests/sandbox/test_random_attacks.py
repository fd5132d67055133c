"""Hostile calls at random, and the host's calls between them: what must always hold.

A failure prints its seed; with SANDBOX_ATTACK_SEED set to it the same attacks run
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from pathlib import Path

import pytest

from m2jax import sandbox

_ATTACKER = Path(__file__).with_name('random_attacker.py').read_bytes()
_MIB = 1 << 20
_LIMITS = sandbox.Limits(
  cpu_s=2,
  memory_bytes=128 * _MIB,
  processes=24,
  file_bytes=8 * _MIB,
  workspace_bytes=16 * _MIB,
  wall_s=1.5,
)
_SLACK_S = 20.0  # for a busy machine
_PATHS = [
  'a',
  'b',
  'a/b',
  'd/e',
  'deep/deep/x',
  '-rf',
  'daemon',
  '...',
  '../x',
  '/',
  '',
]


def _children(pid: str | int) -> list[str]:
  return Path(f'/proc/{pid}/task/{pid}/children').read_text().split()


class _Round:
  """One sandbox under attack, and the neighbour and the canary that must not notice."""

  def __init__(self, rng: random.Random, host: sandbox.Host, canary: Path):
    self._rng = rng
    self._host = host
    self._canary = canary
    self._snapshot = None

  async def run(self, neighbour: sandbox.Sandbox) -> None:
    """Makes a sandbox, has it attacked, checks, destroys it."""
    self._box = await sandbox.create(host=self._host, limits=_LIMITS)
    box = self._box
    try:
      for _ in range(self._rng.randrange(1, 5)):
        await self._attack()
        await self._check_quiet()
        await self._use()
      await self._revive()
      assert (await neighbour.exec('cat mine')).stdout == 'untouched'
    finally:
      destroying = asyncio.create_task(box.exec('sleep 30'))
      await asyncio.sleep(self._rng.choice([0, 0.05]))
      await asyncio.wait_for(box.destroy(), _SLACK_S)
      with contextlib.suppress(sandbox.SandboxError):
        await destroying
    assert self._canary.read_text() == 'sings'
    assert os.listdir(self._canary.parent) == [self._canary.name]

  async def _attack(self) -> None:
    """One command; some are cancelled half-way."""
    box = self._box
    for _ in range(2):  # a directory may be in the way, or no room be left
      with contextlib.suppress(sandbox.SandboxPathError, OSError):
        await box.write('attacker.py', _ATTACKER)
        break
      await box.exec('rm -rf attacker.py f*')
    seed, count = self._rng.randrange(1 << 30), self._rng.choice([3, 20, 60])
    command = f'python3 /workspace/attacker.py {seed} {count} {self._canary}'
    started = time.monotonic()
    running = asyncio.create_task(box.exec(command, self._rng.choice([0.4, 1.5])))
    if self._rng.random() < 0.25:
      await asyncio.sleep(self._rng.random() * 0.2)
      running.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await running
      return
    result = await running
    assert time.monotonic() - started < _LIMITS.wall_s + _SLACK_S
    assert 0 <= result.returncode < 256
    assert len(result.stdout.encode()) <= 4 * _LIMITS.output_bytes

  async def _check_quiet(self) -> None:
    """Nothing of an ended command is alive; a daemon's file no longer grows."""
    sizes = []
    for _ in range(2):
      try:
        sizes.append(len(await self._box.read('daemon')))
      except (sandbox.SandboxPathError, FileNotFoundError):
        sizes.append(None)
      await asyncio.sleep(0.01)
    assert sizes[0] == sizes[1]
    # A cancelled one too: `read` has waited for its end.
    for process_1 in _children(self._box.supervisor_pid):
      assert not _children(process_1)

  async def _use(self) -> None:
    """The host's calls may fail, but never leave the workspace."""
    box = self._box
    for _ in range(3):
      path = self._rng.choice(_PATHS)
      with contextlib.suppress(sandbox.SandboxPathError, FileNotFoundError, OSError):
        assert len(await box.read(path)) <= _LIMITS.workspace_bytes
      with contextlib.suppress(sandbox.SandboxPathError, OSError):
        await box.write(path, b'x' * self._rng.randrange(100_000))
    with contextlib.suppress(sandbox.SandboxPathError):
      snapshot = await box.snapshot()
      assert len(snapshot) <= _LIMITS.workspace_bytes + (64 << 20)
      if self._rng.random() < 0.5:
        self._snapshot = snapshot
    if self._snapshot is not None and self._rng.random() < 0.5:
      await box.restore(self._snapshot)
      assert await box.snapshot() == self._snapshot

  async def _revive(self) -> None:
    """The sandbox still works."""
    for _ in range(10):  # a busy machine may not begin within the wall time
      result = await self._box.exec('chmod u+rwx . ; echo alive')
      if not result.timed_out:
        break
    assert result.stdout == 'alive\n', result


def _open_files(pid: int) -> int:
  return len(os.listdir(f'/proc/{pid}/fd'))


async def _attack_for(seconds: float, seed: int, host: sandbox.Host) -> int:
  """Rounds until the time is over. Returns how many there were."""
  rng, rounds = random.Random(seed), 0
  with tempfile.TemporaryDirectory(dir='/tmp') as directory:
    os.chmod(directory, 0o777)
    canary = Path(directory) / 'canary'
    canary.write_text('sings')
    canary.chmod(0o666)
    neighbour = await sandbox.create(host=host, contents={'mine': b'untouched'})
    pid = neighbour.supervisor_pid
    deadline = time.monotonic() + seconds
    # Others mount, too: containers of another test.
    mounts = lambda: Path(f'/proc/{pid}/mounts').read_text().count('/workspace_')
    open_files = _open_files(pid)
    mounted = mounts()
    assert mounted > 0
    while time.monotonic() < deadline:
      await _Round(rng, host, canary).run(neighbour)
      rounds += 1
    assert neighbour.supervisor_pid == pid
    # One network may have been added to those that are used again.
    assert _open_files(pid) <= open_files + 1
    assert mounts() == mounted
    await neighbour.destroy()
  return rounds


def _seed(default: int | None) -> int:
  given = os.environ.get('SANDBOX_ATTACK_SEED')
  if given:
    return int(given)
  return random.SystemRandom().randrange(1 << 32) if default is None else default


@pytest.mark.parametrize('groups', [True, False], ids=['cgroups', 'rlimits'])
def test_random_attacks(run, groups):
  """A second of attacks, the same every time."""
  seed = _seed(20261122)
  host = sandbox.Host(parallel_execs=70, cgroups=groups)
  assert run(_attack_for(1.0, seed, host)) > 0, seed


@pytest.mark.long
def test_random_attacks_that_are_new(run):
  """Half a minute of attacks that nobody has tried before; the seed is printed.

  Hosts with and without control groups are attacked at the same time.
  """
  seed = _seed(None)
  print(f'SANDBOX_ATTACK_SEED={seed}')

  async def both():
    hosts = [sandbox.Host(parallel_execs=71 + g, cgroups=bool(g)) for g in (0, 1)]
    return await asyncio.gather(*(_attack_for(30.0, seed, host) for host in hosts))

  assert min(run(both())) > 0, seed
