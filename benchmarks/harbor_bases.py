r"""Builds a base image from Debian's and Python's packages, where no registry is.

    apt-get install --no-install-recommends debootstrap podman runc
    python -m benchmarks.harbor_bases --dataset=workdir/foreign/harbor

The image is Debian 12 with Python 3.11, pip, uv, git, curl, tmux, asciinema, openssl
and sqlite3, this machine's certificates, and its settings of apt and pip. Prints which
base image of the dataset's Dockerfiles and task.toml files it can take the place of, as
the flag of `experiments.tasks`, and which it cannot. What it changes: the
distribution and the versions of everything in it, so that a task that needs Ubuntu or
Python 3.13 may fail where its own image works.

Test scripts of Terminal-Bench install uv from the network, and pytest by it. Without
network they find both: uv's file `~/.local/bin/env`, which they read, says so. Needs
root.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from m2jax.sandbox.containers import engines

IMAGE = 'localhost/m2jax/bookworm:1'
_MIRROR = 'http://deb.debian.org/debian'
_PACKAGES = (
  'asciinema ca-certificates curl git openssl procps python3 python3-pip python3-venv '
  'sqlite3 tmux unzip xz-utils'
).split()
# uv resolves for all systems and versions of Python, and so asks for the last four.
_WHEELS = (
  'uv pytest==8.4.1 pytest-json-ctrf==0.3.5 colorama exceptiongroup tomli '
  'typing-extensions'
).split()
_CERTIFICATES = 'etc/ssl/certs/ca-certificates.crt'
# Each container gets a copy of the files, with owners of its own.
_REMOVED = (
  'var/cache/apt/archives',
  'var/lib/apt/lists',
  'usr/share/doc',
  'usr/share/man',
)
# Of this machine, so that builds reach the same packages.
_SETTINGS = 'etc/apt/sources.list.d/debian.sources', _CERTIFICATES
_REPLACED = re.compile(
  r'((docker\.io/)?(library/)?(ubuntu|debian|python|buildpack-deps)'
  r'|ghcr\.io/laude-institute/t-bench/(ubuntu|python)-[\d-]+'
  r'|ghcr\.io/astral-sh/uv)([:@].*)?'
)
_FROM = re.compile(r'^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?', re.I | re.M)
_COPY = re.compile(r'^\s*COPY\s+(?:--\S+\s+)*--from=(\S+)', re.I | re.M)
_IMAGE = re.compile(r'^\s*docker_image\s*=\s*["\']([^"\']+)["\']', re.M)
# Images of Python have these names; Debian's Python has others, and refuses pip.
_DOCKERFILE = r"""
FROM {root}
COPY wheels /opt/wheels
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \
    && ln -s /usr/bin/python3 /usr/local/bin/python \
    && pip install --quiet --no-index --find-links /opt/wheels uv \
    && mkdir -p /root/.local/bin \
    && ln /usr/local/bin/uv /uv && ln /usr/local/bin/uvx /uvx \
    && printf '%s\n' 'export UV_OFFLINE=1 UV_FIND_LINKS=/opt/wheels' \
         > /root/.local/bin/env
ENV SSL_CERT_FILE=/{certificates} UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy
ENV LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive
WORKDIR /app
CMD ["bash"]
"""


def build() -> str:
  """Builds the image if it is not there; returns its name.

  Raises:
    RuntimeError: a program failed; has the end of its words.
  """
  found = subprocess.run(
    ['podman', 'image', 'exists', IMAGE], env=engines.environment()
  )
  if not found.returncode:
    return IMAGE
  with tempfile.TemporaryDirectory() as place:
    root, wheels = pathlib.Path(place, 'root'), pathlib.Path(place, 'wheels')
    include = f'--include={",".join(_PACKAGES)}'
    _run(['debootstrap', '--variant=minbase', include, 'bookworm', str(root), _MIRROR])
    for name in _SETTINGS:
      ours = pathlib.Path('/', name)
      if ours.is_file():
        shutil.copy(ours, root / name)
    if (root / _SETTINGS[0]).exists():
      (root / 'etc/apt/sources.list').unlink()
    settings = ['[global]', f'cert = /{_CERTIFICATES}', *_index()]
    (root / 'etc/pip.conf').write_text('\n'.join(settings) + '\n')
    for name in ('hostname', 'resolv.conf'):
      (root / 'etc' / name).unlink(missing_ok=True)
    for name in _REMOVED:
      shutil.rmtree(root / name)
    wheel = [sys.executable, '-m', 'pip', 'download', '--quiet', '-d', str(wheels)]
    wheel += ['--only-binary=:all:', '--python-version=3.11', '--implementation=cp']
    _run([*wheel, *_WHEELS])
    tar, base = str(pathlib.Path(place, 'root.tar')), f'{IMAGE}-root'
    _run(['tar', '-C', str(root), '--numeric-owner', '-cf', tar, '.'])
    shutil.rmtree(root)
    _run(['podman', 'import', '--quiet', tar, base])
    text = _DOCKERFILE.format(root=base, certificates=_CERTIFICATES)
    pathlib.Path(place, 'Dockerfile').write_text(text)
    pathlib.Path(tar).unlink()
    _run(['podman', 'build', '--network=none', '--pull=never', '-t', IMAGE, place])
  return IMAGE


def _index() -> list[str]:
  """pip's index here, if it is not the usual one."""
  done = subprocess.run(
    [sys.executable, '-m', 'pip', 'config', 'get', 'global.index-url'],
    capture_output=True,
    text=True,
  )
  return [] if done.returncode else [f'index-url = {done.stdout.strip()}']


def _run(command: list[str]) -> None:
  try:
    done = subprocess.run(
      command, env=engines.environment(), capture_output=True, text=True
    )
  except FileNotFoundError as error:
    raise RuntimeError(f'no {command[0]}: apt-get install {command[0]}') from error
  if done.returncode:
    words = (done.stderr.strip() or done.stdout.strip())[-500:]
    raise RuntimeError(f'{" ".join(command[:2])}: {words}')


def named(dataset: pathlib.Path) -> dict[str, int]:
  """Base images of a dataset's tasks, and in how many files each is."""
  counts: collections.Counter[str] = collections.Counter()
  for path in sorted(dataset.rglob('Dockerfile')):
    text = path.read_text(errors='replace')
    images = _FROM.findall(text)
    stages = {stage.lower() for _, stage in images if stage}
    found = {image for image, _ in images} | set(_COPY.findall(text))
    counts.update(
      name
      for name in found
      if name.lower() not in {'scratch', *stages} and not name.isdigit()
    )
  for path in sorted(dataset.rglob('task.toml')):
    counts.update(set(_IMAGE.findall(path.read_text(errors='replace'))))
  return dict(counts.most_common())


def replacements(names) -> dict[str, str]:
  """Those of the images that the base image can take the place of -> its name."""
  return {name: IMAGE for name in names if _REPLACED.fullmatch(name)}


def flag(names: dict[str, str]) -> tuple[str, ...]:
  """Replacements as a config has them, `tasks.containers.replace`."""
  return tuple(f'{name}={image}' for name, image in names.items())


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--dataset', type=pathlib.Path, nargs='*', default=[])
  options = parser.parse_args(argv)
  if reason := engines.unavailable('podman'):
    print(reason, file=sys.stderr)
    return 2
  try:
    image = build()
  except RuntimeError as error:
    print(error, file=sys.stderr)
    return 1
  print(f'built {image}')
  counts: collections.Counter[str] = collections.Counter()
  for dataset in options.dataset:
    counts.update(named(dataset))
  known = replacements(counts)
  for name, count in counts.most_common():
    what = f'replaced by {image}' if name in known else 'not replaced: needs a registry'
    print(f'  {name} ({count} files): {what}')
  if known:
    print(f'--config.tasks.containers.replace="{flag(known)}"')
  return 0


if __name__ == '__main__':
  sys.exit(main())
