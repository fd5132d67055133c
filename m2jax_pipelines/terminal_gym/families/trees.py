"""Families on trees of files: archives, checksums, edits in place, differences."""

from __future__ import annotations

import hashlib
import io
import random
import re
import tarfile

from m2jax_pipelines.terminal_gym.drawn import Degenerate, Drawn, Family, content
from m2jax_pipelines.terminal_gym.families import words


def _archive(files) -> bytes:
  data = io.BytesIO()
  with tarfile.open(fileobj=data, mode='w') as tar:
    for path, text in files.items():
      entry = tarfile.TarInfo(path)
      entry.size, entry.mode, entry.mtime = len(text), 0o644, 1_700_000_000
      tar.addfile(entry, io.BytesIO(text))
  return data.getvalue()


def restore(rng: random.Random) -> Drawn:
  root, backup = words.folder(rng), f'backup-{words.token(rng)}.tar'
  names = words.paths(rng, root, 9, ('.txt', '.md'))
  saved = {name: words.prose(rng, 20).encode() for name in names}
  lost = rng.sample(names, 3)
  now = {n: d + b'edited later\n' if rng.random() < 0.4 else d
         for n, d in saved.items() if n not in lost}  # fmt: skip
  return Drawn(
    files={**now, backup: _archive(saved)},
    values={'root': root, 'backup': backup},
    indirect={'backup': 'the archive', 'root': 'the only folder here'},
    goal='Files of @root@ were deleted. Restore those that are missing from @backup@, '
    'whose names are relative to the workspace.',
    steps=(
      'List the archive with tar -tf.',
      'Write the names that are missing to a list.',
      'Extract these with tar -xf -T.',
    ),  # fmt: skip
    format='A restored file is as it was in the archive.',
    constraint='Files that are still there may have been edited since: they keep their '
    'contents.',
    commands=(
      'tar -tf @backup@ > /tmp/all',
      'while read -r f; do [ -e "$f" ] || echo "$f"; done < /tmp/all > /tmp/lost',
      'tar -xf @backup@ -T /tmp/lost',
    ),
    end={name: content(saved[name].decode()) for name in lost},
    slips=(('|| echo', '&& echo'), ('-T /tmp/lost', '-T /tmp/all'), ('-xf', '-tf')),
    example='tar -xf @backup@',
  )


def checksums(rng: random.Random) -> Drawn:
  root, out = words.folder(rng), f'{words.token(rng)}.txt'
  names = sorted(words.paths(rng, root, 10, ('.dat', '.txt')))
  files = {name: words.prose(rng, 25).encode() for name in names}
  sums = ''.join(f'{hashlib.sha256(d).hexdigest()}  {n}\n' for n, d in files.items())
  bad = rng.sample(names, rng.randint(2, 4))
  for name in bad:
    data = files[name]
    files[name] = data[:-2] + b'?\n'
  gone = bad.pop()
  del files[gone]
  if not bad:
    raise Degenerate('no file is damaged')
  text = ''.join(f'{n}\n' for n in sorted(bad))
  return Drawn(
    files={**files, 'SHA256SUMS': sums.encode()},
    values={'root': root, 'sums': 'SHA256SUMS', 'out': out},
    indirect={'sums': 'the list of checksums'},
    goal='@sums@ has the SHA-256 checksums of the files in @root@. Write the paths of '
    'the files that are there and whose content is another one to @out@.',
    steps=(
      'Check with sha256sum -c.',
      'Keep the lines that end with ": FAILED".',
      'Remove that ending with sed.',
    ),  # fmt: skip
    format='Lists of files have one path per line, relative to this folder and without '
    './ in front, in any order.',
    constraint='A file that is missing does not belong to the list.',
    commands=(
      'sha256sum -c @sums@ > /tmp/checked 2> /dev/null || true',
      "grep ': FAILED$' /tmp/checked > /tmp/failed",
      "sed 's/: FAILED$//' /tmp/failed > @out@",
    ),
    end={out: content(text, 'lines')},
    slips=(
      ("FAILED$' ", "FAILED' "),
      ("': FAILED$'", "': OK$'"),
      ('s/: FAILED$//', 's/ .*//'),
    ),
    example='sha256sum -c @sums@ 2> /dev/null | grep FAILED > @out@',
  )


def settings(rng: random.Random) -> Drawn:
  root, key = words.folder(rng), rng.choice(('timeout', 'retries', 'port', 'workers'))
  new = str(rng.randint(100, 999))
  files, end = {}, {}
  for path in words.paths(rng, root, 7, ('.conf', '.conf', '.conf.orig')):
    rows = [f'# {words.token(rng)}', f'{key} = {rng.randint(1, 99)}',
            f'#{key} = {rng.randint(1, 99)}', f'max_{key} = {rng.randint(1, 99)}',
            f'name = {words.token(rng)}', f'{key}_s = 5']  # fmt: skip
    rng.shuffle(rows)
    text = '\n'.join(rows) + '\n'
    files[path] = text.encode()
    if path.endswith('.conf'):
      changed = [f'{key} = {new}' if row.startswith(f'{key} ') else row for row in rows]
      end[path] = content('\n'.join(changed) + '\n')
  if not end:
    raise Degenerate('no file is to be changed')
  return Drawn(
    files=files,
    values={'root': root, 'key': key, 'new': new},
    indirect={'root': 'the folder of settings'},
    goal='In every .conf file in @root@, at any depth, set @key@ to @new@: the line '
    'that begins with "@key@ = ".',
    steps=('Find the files with find -name.', 'Change them in place with sed -i.'),
    format='Settings are written as "NAME = VALUE". All other lines stay as they are.',
    constraint='Comments, other settings whose names contain @key@, and files with '
    'other endings stay as they are.',
    commands=(
      "find @root@ -name '*.conf' -print0 > /tmp/found",
      "xargs -0 sed -i 's/^@key@ = .*/@key@ = @new@/' < /tmp/found",
    ),
    end=end,
    slips=(
      ('s/^@key@', 's/@key@'),
      ("'*.conf'", "'*.conf*'"),
      ('sed -i ', 'sed -i.bak '),
    ),
    example="find @root@ -type f -exec sed -i 's/@key@ = .*/@key@ = @new@/' {} +",
  )


def differences(rng: random.Random) -> Drawn:
  before, after, out = (words.token(rng) for _ in range(3))
  out += '.txt'
  old = {f'{words.token(rng, 1)}-{i}.txt': words.prose(rng, 15) for i in range(9)}
  new, rows = dict(old), []
  for i, name in enumerate(sorted(old)):
    if i % 4 == rng.randrange(4):
      del new[name]
      rows.append(f'removed {name}')
    elif rng.random() < 0.3:
      new[name] += 'more\n'
      rows.append(f'changed {name}')
  for i in range(rng.randint(1, 3)):
    name = f'{words.token(rng, 1)}-n{i}.txt'
    new[name] = 'new\n'
    rows.append(f'added {name}')
  if len({row.split()[0] for row in rows}) < 3:
    raise Degenerate('not every kind of difference')
  rows.sort()
  both = (before, old), (after, new)
  return Drawn(
    files={f'{root}/{n}': t.encode() for root, tree in both for n, t in tree.items()},
    values={'before': before, 'after': after, 'out': out},
    indirect={},
    goal='Compare the folder @before@ with its later state, @after@: write to @out@ '
    'which files were added, removed and changed.',
    steps=(
      'List the names of both with ls, which sorts them.',
      'Find what only one has with comm.',
      'Compare the common ones with cmp -s.',
      'Sort the lines.',
    ),  # fmt: skip
    format='Differences are written as "added NAME", "removed NAME" and "changed '
    'NAME", one per line, sorted by bytes (LC_ALL=C); names are relative to the '
    'folders.',
    constraint='Files that are equal are not mentioned.',
    commands=(
      'ls @before@ > /tmp/before',
      'ls @after@ > /tmp/after',
      "comm -13 /tmp/before /tmp/after | sed 's/^/added /' > /tmp/rows",
      "comm -23 /tmp/before /tmp/after | sed 's/^/removed /' >> /tmp/rows",
      'comm -12 /tmp/before /tmp/after > /tmp/common',
      'while read -r f; do cmp -s "@before@/$f" "@after@/$f" || echo "changed $f"; '
      'done < /tmp/common >> /tmp/rows',
      'sort /tmp/rows > @out@',
    ),
    end={out: content(''.join(f'{row}\n' for row in rows))},
    slips=(
      ('comm -13', 'comm -23'),
      ('|| echo', '&& echo'),
      ('>> /tmp/rows', '> /tmp/rows'),
      ('sort /tmp', 'cat /tmp'),
    ),  # fmt: skip
    example='diff -rq @before@ @after@ > @out@',
  )


def lines_between(rng: random.Random) -> Drawn:
  path, out = f'{words.folder(rng)}/report.txt', f'{words.token(rng)}.txt'
  names = rng.sample(words.NOUNS, 5)
  parts = {n: words.prose(rng, rng.randint(9, 40)) for n in names}
  text = ''.join(f'[{n}]\n{body}[/{n}]\n' for n, body in parts.items())
  name = rng.choice(names)
  body = parts[name].splitlines()
  kept = [line for line in body if not re.search(r'\bcable\b', line)]
  return Drawn(
    files={path: text.encode()},
    values={'path': path, 'name': name, 'out': out},
    indirect={'path': 'the report'},
    goal='Copy the lines between "[@name@]" and "[/@name@]" of @path@ to @out@, '
    'without these two, and without lines that have the word "cable".',
    steps=(
      'Print the range of lines with sed -n.',
      'Remove the first and the last line of it.',
      'Remove the lines with the word with grep -vw.',
    ),  # fmt: skip
    format='Copied lines keep their order and their text.',
    constraint='Other parts of the report, and the marks around them, are not copied.',
    commands=(
      "sed -n '/^\\[@name@\\]$/,/^\\[\\/@name@\\]$/p' @path@ > /tmp/part",
      "sed '1d;$d' /tmp/part > /tmp/body",
      'grep -vw cable /tmp/body > @out@ || true',
    ),
    end={out: content(''.join(f'{line}\n' for line in kept))},
    slips=(('1d;$d', '1d'), ('grep -vw', 'grep -w'), ('sed -n', 'sed')),
    example='grep -A 5 @name@ @path@ > @out@',
  )


FAMILIES = (
  Family('restore', 'tar', (r'\btar\b', r'archive|backup|extract'), restore),
  Family(
    'checksums', 'sha256sum', (r'checksum|digest|sha\d+sum', r'\bfiles?\b'), checksums
  ),
  Family('settings', 'sed', (r'\bsed\b', r'-i\b|in.place|replac'), settings),
  Family(
    'differences',
    'comm',
    (r'\bdiff\b|\bcomm\b', r'compar', r'director|sorted files'),
    differences,
  ),
  Family(
    'lines_between',
    'sed',
    (r'between two (?:patterns|addresses|lines)|range of lines|sed -n',),
    lines_between,
  ),
)
