r"""Runs task directories by Harbor's own command, in podman, without a registry.

    python3.12 -m venv /tmp/harbor && /tmp/harbor/bin/pip install harbor podman-compose
    python -m benchmarks.harbor_run --python=/tmp/harbor/bin/python \
      --workdir=workdir/reasoning --tasks=1

`harbor run` runs a copy of each task twice: with its solution (agent `oracle`), and
with nothing (`nop`). The copy differs in two things. Its image is built from this
machine's programs, interpreter and the dataset's packages, and of Chromium and fonts if
playwright is one of them, where the task's Dockerfile takes an image of a registry. Its
network mode is `public`: Harbor's podman refuses `no-network`, which needs an image of
a registry as well. Prints the rewards; exits with 1 unless they are 1 and 0. Needs
root, podman and runc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks import harbor_check
from m2jax.sandbox.containers import engines
from m2jax.tasks import harbor

_BASE = 'localhost/m2jax/harbor-base'
_PROGRAMS = (
  'awk base64 basename bash bunzip2 bzip2 cat chmod chown cmp comm cp csplit cut date '
  'dd diff dirname du echo egrep env expand expr false fgrep find fold gawk grep '
  'gunzip gzip head id install join kill ln ls mawk md5sum mkdir mkfifo mktemp mv nl '
  'od paste printf pwd readlink realpath rm rmdir sed seq sh sha256sum shuf sleep sort '
  'split stat sum sync tac tail tar tee test timeout touch tr true truncate tsort '
  'uname uniq wc which xargs xz yes zcat'
).split()
_LINKED = ('*.so*', 'driver/node')  # of packages; the second is playwright's
# What Chromium opens by name: its own directory, fonts, and the modules of NSS.
_BROWSER = ('/usr/lib/chromium', '/etc/fonts', '/usr/share/fonts')
_NSS = ('libsoftokn3', 'libfreebl3', 'libfreeblpriv3', 'libnssckbi')
_NOT_COPIED = shutil.ignore_patterns(
  *('site-packages', 'test', '__pycache__', 'idlelib', 'tkinter', 'config-*')
)
_RUN_S = 900.0
_NO_NETWORK = 'network_mode = "no-network"'

_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc={processes}:{processes}"]
log_driver = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


@contextlib.contextmanager
def settings() -> Iterator[dict[str, str]]:
  """The environment of Harbor's podman: runc, and limits that this process may set.

  crun fails under hybrid control groups, and the default limits need CAP_SYS_RESOURCE.
  """
  with tempfile.TemporaryDirectory() as place:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    conf = pathlib.Path(place, 'containers.conf')
    conf.write_text(_CONF.format(processes=4096 if most < 0 else min(most, 4096)))
    yield {**os.environ, 'CONTAINERS_CONF': str(conf)}


def base(environment: dict[str, str], sites: pathlib.Path) -> str:
  """Builds an image of this machine's programs and interpreter; returns its name.

  Args:
    environment: environment variables for podman.
    sites: directories of packages, whose libraries the image has to have.

  Raises:
    RuntimeError: podman cannot build it.
  """
  with tempfile.TemporaryDirectory() as place:
    root = pathlib.Path(place, 'root')
    prefix = pathlib.Path(sys.base_prefix)
    ours = root / prefix.relative_to('/')
    name = f'python{sys.version_info.major}.{sys.version_info.minor}'
    shutil.copytree(prefix / 'lib' / name, ours / 'lib' / name, ignore=_NOT_COPIED)
    (ours / 'lib' / name / 'site-packages').mkdir()
    (ours / 'bin').mkdir()
    shutil.copy(prefix / 'bin' / name, ours / 'bin' / 'python3')
    modules = (prefix / 'lib' / name / 'lib-dynload').glob('*.so')
    found = filter(None, map(shutil.which, _PROGRAMS))
    packages = {path.resolve() for name in _LINKED for path in sites.rglob(name)}
    needed = _needed([*found, prefix / 'bin' / name, *modules, *packages])
    for file in needed:
      if sites.resolve() in file.resolve().parents:
        continue  # `copied` has it
      _copy(file, root, file if prefix in file.parents else _merged(file))
    if any(sites.glob('*/playwright')):
      _copy_browser(root)
    for directory in ('tmp', 'etc', 'root'):
      (root / directory).mkdir(exist_ok=True)
    (root / 'etc' / 'passwd').write_text('root:x:0:0:root:/root:/bin/bash\n')
    path = f'{prefix}/bin:/bin:/sbin'
    pathlib.Path(place, 'Dockerfile').write_text(
      f'FROM scratch\nCOPY root/ /\nENV PATH={path}\n'
    )
    command = ['podman', 'build', '--network', 'none', '-t', _BASE, place]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
      raise RuntimeError(f'podman build: {done.stderr.strip()[-500:]}')
  return _BASE


def _copy(file: pathlib.Path, root: pathlib.Path, inside: pathlib.Path):
  target = root / inside.relative_to('/')
  if not target.exists():
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


def _copy_browser(root: pathlib.Path):
  """Chromium, the libraries that it needs and what it opens by name."""
  for top in _BROWSER:
    for file in filter(pathlib.Path.is_file, pathlib.Path(top).rglob('*')):
      _copy(file, root, file)
  programs = [path for path in pathlib.Path(_BROWSER[0]).iterdir() if path.is_file()]
  for name in _NSS:
    programs += pathlib.Path('/usr/lib').rglob(f'{name}.*')
  for file in _needed(programs):
    if pathlib.Path(_BROWSER[0]) not in file.parents:
      _copy(file, root, _merged(file))
  for place in (root / 'lib').glob('*-linux-gnu*'):  # some name it in full
    (root / 'usr' / 'lib' / place.name).symlink_to(f'../../lib/{place.name}')


def _merged(file: pathlib.Path) -> pathlib.Path:
  """A path of /usr without it, so that /bin and /lib have everything."""
  parts = file.parts
  return pathlib.Path('/', *parts[2:]) if parts[1] == 'usr' else file


def _needed(files) -> set[pathlib.Path]:
  """Files and the libraries that they are linked with."""
  found = {pathlib.Path(file) for file in files}
  for file in tuple(found):
    done = subprocess.run(['ldd', file], capture_output=True, text=True)
    found |= set(map(pathlib.Path, re.findall(r'(/\S+) \(0x', done.stdout)))
  return found


@contextlib.contextmanager
def copied(directory: harbor.Directory) -> Iterator[pathlib.Path]:
  """A copy of a task on the image of `base`; see the module."""
  with tempfile.TemporaryDirectory() as place:
    copy = pathlib.Path(place, directory.path.name)
    shutil.copytree(directory.path, copy)
    environment, steps = copy / 'environment', [f'FROM {_BASE}']
    metadata = directory.metadata
    if site := metadata.verifier_site or metadata.site:
      shutil.copytree(directory.dataset / 'sites' / site, environment / 'site')
      version = f'python{sys.version_info.major}.{sys.version_info.minor}'
      steps.append(f'COPY site/ {sys.base_prefix}/lib/{version}/site-packages/')
    dockerfile = environment / 'Dockerfile'
    _, mark, rest = dockerfile.read_text().partition('WORKDIR /workspace\n')
    dockerfile.write_text('\n'.join(steps) + f'\n{mark}{rest}')
    settings = (copy / 'task.toml').read_text()
    if _NO_NETWORK not in settings or not mark:
      raise RuntimeError(f'{directory.path}: not as `harbor.write` writes it')
    public = settings.replace(_NO_NETWORK, 'network_mode = "public"')
    (copy / 'task.toml').write_text(public)
    yield copy


def reward(python: str, task: pathlib.Path, agent: str, environment) -> float:
  """The reward that Harbor has for one run.

  Args:
    python: an interpreter that has harbor and podman-compose.
    task: directory.
    agent: 'oracle' or 'nop'.
    environment: environment variables for podman.

  Raises:
    RuntimeError: Harbor gave none; has the end of its output.
  """
  programs = os.path.dirname(python)
  path = {'PATH': f'{programs}{os.pathsep}{environment["PATH"]}'}
  # Without it, litellm waits for a list of prices from the network.
  quiet = {'LITELLM_LOCAL_MODEL_COST_MAP': 'True'}
  with tempfile.TemporaryDirectory() as jobs:
    command = [f'{programs}/harbor', 'run', '-p', str(task), '-a', agent]
    command += ['-e', 'podman', '-n', '1', '-o', jobs, '-q']
    done = subprocess.run(
      command,
      env={**environment, **path, **quiet},
      capture_output=True,
      text=True,
      timeout=_RUN_S,
    )
    found = list(pathlib.Path(jobs).glob('*/*/result.json'))
    results = [json.loads(path.read_text()) for path in found]
    rewards = [r['verifier_result']['rewards'] for r in results if r['verifier_result']]
    if done.returncode or len(rewards) != 1:
      logs = [log.read_text()[-1500:] for log in pathlib.Path(jobs).glob('*/*/*.log')]
      errors = [str(r['exception_info'])[-1500:] for r in results]
      said = [done.stdout[-1500:], done.stderr[-500:], *logs, *errors]
      raise RuntimeError('\n'.join(said))
    return rewards[0]['reward']


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--python', required=True, help='interpreter that has harbor')
  parser.add_argument('--workdir', type=pathlib.Path, required=True, nargs='+')
  parser.add_argument('--tasks', type=int, default=1, help='of each')
  options = parser.parse_args(argv)
  if not pathlib.Path(options.python).with_name('harbor').is_file():
    parser.error('--python: no harbor beside it: pip install harbor podman-compose')
  if reason := engines.unavailable('podman'):
    print(reason, file=sys.stderr)
    return 2
  wrong = 0
  with settings() as environment:
    for workdir in options.workdir:
      paths = harbor_check.chosen(workdir, options.tasks)
      if not paths:
        print(f'{workdir}: no tasks: make some with make_tasks', file=sys.stderr)
        wrong += 1
        continue
      base(environment, workdir / 'sites')
      for path in paths:
        with copied(harbor.read(path)) as task:
          rewards = [
            reward(options.python, task, agent, environment)
            for agent in ('oracle', 'nop')
          ]
        print(f'{path}: solution {rewards[0]:g}, nothing {rewards[1]:g}', flush=True)
        wrong += rewards[0] != 1 or rewards[1] == 1
  return int(wrong > 0)


if __name__ == '__main__':
  sys.exit(main())
