r"""Compares rewards of Harbor's own command with ours, task by task.

    python3.12 -m venv /tmp/harbor && /tmp/harbor/bin/pip install harbor podman-compose
    python -m benchmarks.harbor_bases --dataset workdir/foreign/harbor
    python -m benchmarks.harbor_run --python=/tmp/harbor/bin/python \
      --dataset workdir/foreign/harbor

Each task runs four times: by `harbor run` in podman and by m2jax, each with the task's
solution (Harbor's agent `oracle`) and with no work (`nop`). Harbor gets a copy of the
task that differs in two things. Its base images are those of `harbor_bases`, as for
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

_RUN_S = 1800.0
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


@contextlib.contextmanager
def copied(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A copy of a task for Harbor's podman; see the module."""
  with tempfile.TemporaryDirectory() as place:
    copy = pathlib.Path(place, path.name)
    shutil.copytree(path, copy, symlinks=True)
    names = harbor_bases.replacements(harbor_bases.named(copy))
    for file in (*copy.rglob('Dockerfile'), copy / 'task.toml'):
      text = file.read_text()
      for name, image in names.items():
        text = re.sub(rf'(?<![\w./:-]){re.escape(name)}(?![\w./:@-])', image, text)
      if file.name == 'task.toml':
        text = _CLOSED.sub('network_mode = "public"', text)
      file.write_text(text)
    yield copy


def theirs(python: str, task: pathlib.Path, agent: str) -> float | None:
  """The reward that Harbor has for one run; None if it has none.

  Args:
    python: an interpreter that has harbor and podman-compose.
    task: directory, as `copied` makes it.
    agent: 'oracle' or 'nop'.
  """
  programs = os.path.dirname(python)
  with tempfile.TemporaryDirectory() as place:
    conf, jobs = pathlib.Path(place, 'containers.conf'), pathlib.Path(place, 'jobs')
    conf.write_text(_CONF)
    env = {
      **os.environ,
      'CONTAINERS_CONF': str(conf),
      'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}',
      # Without it, litellm waits for a list of prices from the network.
      'LITELLM_LOCAL_MODEL_COST_MAP': 'True',
    }
    command = [f'{programs}/harbor', 'run', '-p', str(task), '-a', agent]
    command += ['-e', 'podman', '-n', '1', '-o', str(jobs), '-q']
    done = subprocess.run(
      command, env=env, capture_output=True, text=True, timeout=_RUN_S
    )
    results = [json.loads(p.read_text()) for p in jobs.glob('*/*/result.json')]
    rewards = [r['verifier_result']['rewards'] for r in results if r['verifier_result']]
    if len(rewards) == 1:
      return float(rewards[0]['reward'])
    said = [str(r['exception_info'])[-1500:] for r in results] or [done.stderr[-1500:]]
    print(f'{task.name}, {agent}: harbor has no reward: {said}', file=sys.stderr)
    return None


async def ours(config: harbor.Config, task: tasks.Found, solve: bool) -> float | None:
  """The reward that m2jax has for the solution or for no work; None if it has none."""
  values = tasks_config.get_config().limits
  limits = common.build(sandbox.Limits, values, 'limits')
  try:
    reward, reason = await tasks.attempt(config, limits, task, solve)
  except (sandbox.SandboxError, harbor.BadTask) as error:
    reward, reason = None, str(error)
  if reward is None:
    print(f'{task.path.name}: m2jax has no reward: {reason}', file=sys.stderr)
  return reward


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--python', required=True, help='interpreter that has harbor')
  parser.add_argument('--dataset', type=pathlib.Path, required=True, nargs='+')
  parser.add_argument('--tasks', type=int, default=0, help='of each; 0 is all')
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
    found = found[:: max(1, len(found) // options.tasks)] if options.tasks else found
    if not found:
      print(f'{dataset}: no tasks', file=sys.stderr)
      wrong += 1
    for task in found[: options.tasks or None]:
      pairs = []
      with copied(task.path) as copy:
        for agent in ('oracle', 'nop'):
          mine = asyncio.run(ours(config, task, agent == 'oracle'))
          pairs.append((theirs(options.python, copy, agent), mine))
      agrees = all(a == b is not None for a, b in pairs)
      cells = [f'{shown(a):>6}  {shown(b):>5}' for a, b in pairs]
      end = '' if agrees else '  differs'
      print(f'{task.path.name:<32} {cells[0]:>16} {cells[1]:>16}{end}', flush=True)
      wrong += not agrees
  return int(wrong > 0)


if __name__ == '__main__':
  sys.exit(main())
