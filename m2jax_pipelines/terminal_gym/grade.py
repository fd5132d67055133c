"""Judges the end state of a workspace: every entry, and nothing beside them.

expected.json has the entries that there must be (`drawn.Drawn.expected`). The listing
of the workspace was made by the host; files are read from the tree, which has regular
files only. No code of the agent runs here: what its program printed is in the runs.
"""

import json
import os
import sys

_FOLDER_MODE = 0o755
TESTS = os.environ.get('M2JAX_TESTS', os.path.dirname(os.path.abspath(__file__)))


class Wrong(Exception):
  """The end state fails; the message is the reason."""


def lines_of(text):
  """Lines without trailing spaces, and without empty ones."""
  return [line.rstrip() for line in text.split('\n') if line.strip()]


def value_of(text):
  """The value of a JSON text; numbers and booleans stay distinct. Raises ValueError."""

  def refuse(name):
    raise ValueError(f'{name} is not JSON')

  def pairs(items):
    if len({key for key, _ in items}) != len(items):
      raise ValueError('a key is repeated')
    return dict(items)

  value = json.loads(text, parse_constant=refuse, object_pairs_hook=pairs)
  return json.dumps(value, sort_keys=True)


def same(compare, wanted, found):
  """Whether a file's text is as wanted."""
  if compare == 'any':
    return bool(found.strip())
  if compare == 'lines':
    return sorted(lines_of(wanted)) == sorted(lines_of(found))
  if compare == 'words':
    split = [[line.split() for line in lines_of(t)] for t in (wanted, found)]
    return split[0] == split[1]
  if compare == 'json':
    try:
      return value_of(wanted) == value_of(found)
    except (ValueError, RecursionError, MemoryError):
      return False
  return wanted == found


def check_entry(path, wanted, found, read):
  """Raises Wrong unless an entry is as wanted."""
  whose = 'was changed' if wanted.get('given') else 'is not what was asked for'
  if found is None:
    raise Wrong(f'{path}: missing')
  if found['kind'] != wanted['kind']:
    raise Wrong(f'{path}: is a {found["kind"]}, not a {wanted["kind"]}')
  if wanted['kind'] == 'link':
    if found['target'] != wanted['target']:
      raise Wrong(f'{path}: the link {whose}')
    return
  mode = wanted.get('mode')
  if mode is not None and found['mode'] != mode:
    raise Wrong(f'{path}: the mode is {found["mode"]:o}, not {mode:o}')
  if found['mode'] & ~0o777:
    raise Wrong(f'{path}: the mode is {found["mode"]:o}')
  data = read(path)
  if data is None:
    raise Wrong(f'{path}: cannot be read')
  try:
    text = data.decode(wanted.get('encoding', 'utf-8'))
  except UnicodeDecodeError:
    raise Wrong(f'{path}: not UTF-8') from None
  if not same(wanted['compare'], wanted['text'], text):
    raise Wrong(f'{path}: {whose}')


def check_folder(path, mode, given):
  """Raises Wrong if the mode of a folder was changed, or has more than permissions."""
  if mode & ~0o777 or given and mode != _FOLDER_MODE:
    raise Wrong(f'{path}: the mode is {mode:o}')


def check_runs(wanted, runs):
  """Raises Wrong unless the program printed what it must for every hidden input."""
  for number, text in enumerate(wanted):
    run = runs.get(str(number), {'ok': False})
    if not run['ok']:
      raise Wrong(f'hidden input {number}: the program failed')
    if lines_of(run['stdout']) != lines_of(text):
      raise Wrong(f'hidden input {number}: the program printed something else')
    if not run['unchanged']:
      raise Wrong(f'hidden input {number}: the program changed files')


def judge(expected, listing, read, runs):
  """(reward, reason) of an end state.

  Args:
    expected: content of expected.json.
    listing: path → facts of all entries of the workspace.
    read: function of a path: its bytes, or None.
    runs: number → result of the agent's program.
  """
  entries = expected['entries']
  parents = set()
  for path in entries:
    while path := os.path.dirname(path):
      parents.add(path)
  try:
    for path, found in sorted(listing.items()):
      known = path in entries or path in parents and found['kind'] == 'directory'
      given = path in expected['directories']
      if not known and not given:
        raise Wrong(f'{path[:200]!a}: was not asked for')
      if found['kind'] == 'directory':
        check_folder(path, found['mode'], given)
    for path, wanted in sorted(entries.items()):
      check_entry(path, wanted, listing.get(path), read)
    check_runs(expected['outputs'], runs)
  except Wrong as wrong:
    return 0, str(wrong)
  return 1, ''


def load(variable):
  """The value of a JSON file that an environment variable names; {} without one."""
  path = os.environ.get(variable, '')
  if not os.path.exists(path):
    return {}
  with open(path, encoding='utf-8') as file:
    return json.load(file)


def in_place(tree, expected):
  """(listing, runs) where the agent's container is judged, as Harbor does it."""
  import subprocess
  import tempfile

  sys.path.insert(0, TESTS)
  import compose

  listing, runs = compose.listing(tree), {}
  for number in range(len(expected['outputs'])):
    with tempfile.TemporaryDirectory() as place:
      source = os.path.join(TESTS, 'inputs', str(number))
      files = compose.gather(tree, ['*'], []) | compose.gather(source, ['*'], [])
      compose.write(files, os.path.join(place, 'w'))
      try:
        done = subprocess.run(
          ['bash', '-c', expected['run']],
          cwd=os.path.join(place, 'w'),
          capture_output=True,
          timeout=30,
        )
        text, ok = done.stdout.decode(errors='replace'), not done.returncode
      except subprocess.TimeoutExpired:
        text, ok = '', False
      unchanged = compose.unchanged(os.path.join(place, 'w'), files)
    runs[str(number)] = {'ok': ok, 'stdout': text, 'unchanged': unchanged}
  return listing, runs


def main():
  tree = os.environ.get('M2JAX_TREE', '/workspace')
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  with open(os.path.join(TESTS, 'expected.json'), encoding='utf-8') as file:
    expected = json.load(file)
  # From here on, running out of memory or time is the doing of the agent's files.
  print('m2jax: ready', flush=True)
  if 'M2JAX_TREE' in os.environ:
    listing, runs = load('M2JAX_LISTING'), load('M2JAX_RUNS')
  else:
    listing, runs = in_place(tree, expected)

  def read(path):
    try:
      with open(os.path.join(tree, path), 'rb') as file:
        return file.read()
    except OSError:
      return None

  reward, reason = judge(expected, listing, read, runs)
  os.makedirs(logs, exist_ok=True)
  with open(os.path.join(logs, 'details.json'), 'w') as file:
    json.dump({'reason': reason}, file)
  with open(os.path.join(logs, 'reward.txt'), 'w') as file:
    file.write(f'{reward}\n')


if __name__ == '__main__':
  main()
