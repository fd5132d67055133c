r"""Compares rewards of Harbor's own command with ours, task by task.

    python3.12 -m venv /tmp/harbor && /tmp/harbor/bin/pip install harbor podman-compose
    python -m benchmarks.harbor_bases --dataset workdir/foreign/harbor
    python -m benchmarks.harbor_run --python=/tmp/harbor/bin/python \
      --dataset workdir/foreign/harbor

Each task runs four times: by `harbor run` in podman and by m2jax, each with the task's
solution (Harbor's agent `oracle`) and with no work (`nop`). Harbor gets copies of the
tasks that differ in two things. Its base images are those of `harbor_bases`, as for
m2jax, where the task's Dockerfile takes images of a registry. Its network mode is
`public`: Harbor's podman refuses `no-network`, which needs an image of a registry as
well; in m2jax the containers have no network. Exits with 1 if a reward differs, or if
there is none. Needs root, podman and runc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks import harbor_bases
from configs import tasks as tasks_config
from experiments import common, tasks
from m2jax import sandbox
from m2jax.sandbox.containers import engines
from m2jax.tasks import harbor

_STARTS = 3
_TIMES = 10  # limits of time are not compared, and this network may be slow
_CLOSED = re.compile(r'network_mode\s*=\s*"no-network"|allow_internet\s*=\s*false')
# As those of `m2jax.sandbox.containers.engines`, but for what Harbor leaves unsaid.
_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


def _name(task: str) -> str:
  """The base image's name in a task's copy: Harbor removes the images of a trial."""
  return f'localhost/m2jax/base-{task.lower()}:1'


@contextlib.contextmanager
def copied(paths: list[pathlib.Path]) -> Iterator[pathlib.Path]:
  """A folder with copies of tasks for Harbor's podman; see the module."""
  with tempfile.TemporaryDirectory() as place:
    for path in paths:
      copy = pathlib.Path(place, path.name)
      shutil.copytree(path, copy, symlinks=True)
      names = dict.fromkeys(
        harbor_bases.replacements(harbor_bases.named(copy)), _name(path.name)
      )
      for file in (*copy.rglob('Dockerfile'), copy / 'task.toml'):
        text = file.read_text()
        for name, image in names.items():
          text = re.sub(rf'(?<![\w./:-]){re.escape(name)}(?![\w./:@-])', image, text)
        if file.name == 'task.toml':
          text = _CLOSED.sub('network_mode = "public"', text)
        file.write_text(text)
    yield pathlib.Path(place)


def theirs(
  python: str, dataset: pathlib.Path, agent: str, jobs: int
) -> dict[str, float]:
  """Task -> the reward that Harbor has; those for which it has none are printed.

  Args:
    python: an interpreter that has harbor and podman-compose.
    dataset: directory, as `copied` makes it.
    agent: 'oracle' or 'nop'.
    jobs: tasks at a time.
  """
  programs = os.path.dirname(python)
  with tempfile.TemporaryDirectory() as place:
    conf, out = pathlib.Path(place, 'containers.conf'), pathlib.Path(place, 'jobs')
    conf.write_text(_CONF)
    env = {
      **os.environ,
      'CONTAINERS_CONF': str(conf),
      'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}',
      # Without it, litellm waits for a list of prices from the network.
      'LITELLM_LOCAL_MODEL_COST_MAP': 'True',
    }
    command = [f'{programs}/harbor', 'run', '-p', str(dataset), '-a', agent]
    command += ['-e', 'podman', '-n', str(jobs), '-o', str(out), '-q']
    command += ['--timeout-multiplier', str(_TIMES)]
    names = [_name(path.name) for path in dataset.iterdir()]
    for name in names:
      subprocess.run(['podman', 'tag', harbor_bases.IMAGE, name], env=env, check=True)
    for _ in range(_STARTS):
      done = subprocess.run(command, env=env, capture_output=True, text=True)
      if found := list(out.glob('*/*/result.json')):
        break  # else podman did not answer in time, on a loaded machine
    else:
      print(f'harbor run: {(done.stdout + done.stderr)[-1500:]}', file=sys.stderr)
    subprocess.run(['podman', 'rmi', '--ignore', *names], env=env, capture_output=True)
    rewards = {}
    for result in (json.loads(path.read_text()) for path in found):
      name = pathlib.Path(result['task_id']['path']).name
      if result['verifier_result']:
        rewards[name] = float(result['verifier_result']['rewards']['reward'])
      else:
        said = (result['exception_info'] or {}).get('exception_message', '')[-500:]
        print(f'{name}, {agent}: harbor has no reward: {said}', file=sys.stderr)
    return rewards


async def ours(
  config: harbor.Config, chosen: list[tasks.Found], jobs: int
) -> dict[str, tuple[float | None, float | None]]:
  """Task -> m2jax's rewards of its solution and of no work; None if it has none."""
  values = tasks_config.get_config().limits
  limits = common.build(sandbox.Limits, values, 'limits')
  free = asyncio.Semaphore(jobs)

  async def one(task: tasks.Found, solve: bool) -> float | None:
    async with free:
      try:
        reward, reason = await tasks.attempt(config, limits, task, solve)
      except (sandbox.SandboxError, harbor.BadTask) as error:
        reward, reason = None, str(error)
    if reward is None:
      print(f'{task.path.name}: m2jax has no reward: {reason}', file=sys.stderr)
    return reward

  both = [asyncio.gather(one(task, True), one(task, False)) for task in chosen]
  rewards = await asyncio.gather(*both)
  await sandbox.shutdown()
  return {t.path.name: tuple(r) for t, r in zip(chosen, rewards, strict=True)}


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--python', required=True, help='interpreter that has harbor')
  parser.add_argument('--dataset', type=pathlib.Path, required=True, nargs='+')
  parser.add_argument('--tasks', type=int, default=0, help='of each; 0 is all')
  parser.add_argument('--jobs', type=int, default=2, help='tasks at a time')
  options = parser.parse_args(argv)
  if not pathlib.Path(options.python).with_name('harbor').is_file():
    parser.error('--python: no harbor beside it: pip install harbor podman-compose')
  if reason := engines.unavailable('podman'):
    print(reason, file=sys.stderr)
    return 2
  wrong = 0
  shown = lambda reward: '-' if reward is None else f'{reward:g}'
  print(f'{"task":<32} {"solution":>16} {"nothing":>16}\n{"harbor  m2jax":>49}', end='')
  print(f' {"harbor  m2jax":>16}')
  for dataset in options.dataset:
    names = harbor_bases.replacements(harbor_bases.named(dataset))
    containers = harbor.Containers(build_network='host', replace=names)
    config = harbor.Config(dataset=str(dataset), containers=containers)
    found = sorted(tasks.found(config), key=lambda task: task.path)
    found = [task for task in found if task.directory is not None]
    found = found[:: max(1, len(found) // options.tasks)] if options.tasks else found
    chosen = found[: options.tasks or None]
    if not chosen:
      print(f'{dataset}: no tasks', file=sys.stderr)
      wrong += 1
    mine = asyncio.run(ours(config, chosen, options.jobs))
    with copied([task.path for task in chosen]) as copies:
      agents = 'oracle', 'nop'
      other = [theirs(options.python, copies, a, options.jobs) for a in agents]
    for task in chosen:
      name = task.path.name
      pairs = list(zip((found.get(name) for found in other), mine[name], strict=True))
      agrees = all(a == b is not None for a, b in pairs)
      cells = [f'{shown(a):>6}  {shown(b):>5}' for a, b in pairs]
      end = '' if agrees else '  differs'
      print(f'{name:<32} {cells[0]:>16} {cells[1]:>16}{end}', flush=True)
      wrong += not agrees
  return int(wrong > 0)


if __name__ == '__main__':
  sys.exit(main())
