"""Available sources: installed Python distributions and Debian packages.

A dataset's `sites/KEY` has Python packages for its sandboxes. `site` fills it from
the distributions of this interpreter, without network. `debian` finds or unpacks a
Debian package, with its provenance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SKIPPED = ('__pycache__', 'tests', 'test')


class SourceMissing(RuntimeError):
  """A source is not on this machine and cannot be fetched; says what to do."""


@dataclasses.dataclass(frozen=True)
class Source:
  """Provenance: name, version, hash and licence of what was read."""

  name: str
  version: str
  sha256: str
  license: str

  def facts(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def distribution(name: str) -> importlib.metadata.Distribution:
  """An installed distribution. Raises SourceMissing."""
  try:
    return importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    raise SourceMissing(
      f'{name} is not installed; run: pip install -e ./m2jax_pipelines'
    ) from None


def license_of(found: importlib.metadata.Distribution) -> str:
  """The licence that a distribution states, in one line."""
  text = found.metadata.get('License-Expression') or found.metadata.get('License') or ''
  if text.strip():
    return text.strip().splitlines()[0][:80]
  classifiers = found.metadata.get_all('Classifier') or ()
  stated = [c.rpartition(' :: ')[2] for c in classifiers if c.startswith('License')]
  return ', '.join(stated) or 'unknown'


def site(sites: Path, key: str, names: Sequence[str]) -> Path:
  """Fills `sites/KEY` with distributions of this interpreter; returns it.

  An interrupted call leaves no `KEY`; one that exists is used as it is.
  """
  target = sites / key
  if target.is_dir():
    return target
  partial = sites / f'.{key}.partial'
  shutil.rmtree(partial, ignore_errors=True)
  for name in names:
    found = distribution(name)
    for file in found.files or ():
      parts = file.parts
      if parts[0] in ('..', '/') or any(part in _SKIPPED for part in parts[1:-1]):
        continue
      origin, copy = Path(found.locate_file(file)), partial / file
      if origin.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(origin, copy)  # with its mode: some files are programs
  partial.rename(target)
  return target


def debian(name: str, path: str, directory: Path) -> tuple[Path, Source]:
  """`path` of a Debian package, installed or unpacked into `directory`.

  Raises:
    SourceMissing: the package is not installed and cannot be downloaded.
  """
  installed = Path('/') / path
  version = _output('dpkg-query', '-W', '-f', '${Version}', name)
  if version and installed.exists():
    root = Path('/')
  else:
    root = directory / name
    if not root.is_dir():
      _unpack(name, root)
    version = (root / '.version').read_text()
  found = root / path
  if not found.exists():
    raise SourceMissing(f'the Debian package {name} has no {path}')
  return found, Source(name, version, digest(found), _debian_license(root, name))


def digest(path: Path) -> str:
  """SHA-256 of a file, or of the names and contents below a directory."""
  whole = hashlib.sha256()
  files = (
    [path] if path.is_file() else sorted(p for p in path.rglob('*') if p.is_file())
  )
  for file in files:
    whole.update(b'' if file == path else file.relative_to(path).as_posix().encode())
    whole.update(file.read_bytes())
  return whole.hexdigest()


def _unpack(name: str, root: Path) -> None:
  partial = root.with_name(f'.{name}.partial')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  os.chmod(partial, 0o755)
  try:
    subprocess.run(
      ['apt-get', 'download', name], cwd=partial, check=True, capture_output=True
    )
    (archive,) = partial.glob('*.deb')
    subprocess.run(['dpkg-deb', '-x', archive, partial], check=True)
  except (OSError, ValueError, subprocess.CalledProcessError) as error:
    raise SourceMissing(
      f'the Debian package {name} is not here; run: apt-get install {name} ({error})'
    ) from error
  (partial / '.version').write_text(archive.name.split('_')[1].replace('%3a', ':'))
  archive.unlink()
  partial.rename(root)


def _debian_license(root: Path, name: str) -> str:
  path = root / 'usr/share/doc' / name / 'copyright'
  text = path.read_text('utf-8', 'replace') if path.is_file() else ''
  for line in text.splitlines():
    if line.startswith('License:') and line[8:].strip():
      return line[8:].strip()
  if 'GNU Free Documentation' in ' '.join(text.split()):
    return 'GFDL-1.1'
  return f'see usr/share/doc/{name}/copyright'


def _output(*command: str) -> str:
  try:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
  except OSError:
    return ''
