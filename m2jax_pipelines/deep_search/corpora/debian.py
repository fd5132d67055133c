"""The installed Debian packages: descriptions and dependencies of dpkg's database."""

from __future__ import annotations

import re
from pathlib import Path

from m2jax_pipelines import installed

DESCRIPTION = 'the list of the packages of a Debian system, linked by dependencies'
FOLD = False
STATUS = Path('/var/lib/dpkg/status')
_FIELDS = ('Section', 'Maintainer', 'Architecture', 'Version', 'Homepage', 'Source')
_NAME = re.compile(r'^[a-z0-9][a-z0-9.+-]+')


def read(directory: Path):
  """Returns the packages and their source."""
  del directory
  if not STATUS.is_file():
    raise installed.SourceMissing(f'no {STATUS}: this is no Debian system')
  passages = []
  for block in STATUS.read_text('utf-8', 'replace').split('\n\n'):
    fields = _fields(block)
    if 'Package' not in fields or 'Description' not in fields:
      continue
    links = []
    for word in re.split(r'[,|]', fields.get('Depends', '')):
      found = _NAME.match(word.strip())
      links += [found.group()] if found else []
    lines = [f'{f}: {fields[f]}' for f in _FIELDS if f in fields]
    text = '\n'.join([fields['Package'], '', fields['Description'], '', *lines])
    passages.append(((fields['Package'],), (), text, links))
  version = Path('/etc/debian_version').read_text().strip()
  source = installed.Source(
    'dpkg', version, installed.digest(STATUS), 'those of the packages'
  )
  return passages, source


def _fields(block: str) -> dict[str, str]:
  fields, name = {}, ''
  for line in block.splitlines():
    if line[:1] in (' ', '\t'):
      fields[name] += '\n' + line.strip().removeprefix('.')
    elif ':' in line:
      name, _, value = line.partition(':')
      fields[name] = value.strip()
  return fields
