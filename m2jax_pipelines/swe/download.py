"""Downloads a source distribution with pip's finder and session; runs no code of it.

    python download.py NAME==VERSION DIRECTORY LIMIT_BYTES

`pip download` builds the metadata of a source distribution, which runs its build
backend here. This program asks pip where packages are (its configuration, indexes,
certificates and proxies), checks the hash that the index states, and stops there.
"""

import hashlib
import os
import sys


def main(requirement, directory, limit_bytes):
  """Writes the file into the new directory, under its own name."""
  from pip._internal.commands import create_command
  from pip._vendor.packaging.requirements import Requirement

  wanted = Requirement(requirement)
  command = create_command('download')
  options, _ = command.parse_args(['--no-binary', wanted.name, requirement])
  with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    best = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate
    if best is None:
      sys.exit(f'ERROR: no source distribution of {requirement}')
    link = best.link
    if not link.filename.endswith('.tar.gz') or '/' in link.filename:
      sys.exit(f'ERROR: {link.filename} is not a .tar.gz')
    data = content(session, link.url.partition('#')[0], limit_bytes)
  if link.hash_name and hashlib.new(link.hash_name, data).hexdigest() != link.hash:
    sys.exit(f'ERROR: {link.filename} does not have the hash of the index')
  os.makedirs(directory, exist_ok=True)
  partial = os.path.join(directory, f'.{os.getpid()}')
  with open(partial, 'wb') as file:
    file.write(data)
  os.replace(partial, os.path.join(directory, link.filename))


def content(session, url, limit_bytes):
  """The bytes at a URL, read up to the limit."""
  plain = {'Accept-Encoding': 'identity'}
  answer = session.get(url, headers=plain, stream=True)
  answer.raise_for_status()
  data = b''
  while part := answer.raw.read(1 << 16):
    data += part
    if len(data) > limit_bytes:
      sys.exit(f'ERROR: {url} has more than {limit_bytes} bytes')
  return data


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
