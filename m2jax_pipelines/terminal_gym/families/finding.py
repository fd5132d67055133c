"""Families that select files by what find tests: size, age, links, permissions."""

from __future__ import annotations

import random

from m2jax_pipelines.terminal_gym.drawn import Degenerate, Drawn, Family, content, link
from m2jax_pipelines.terminal_gym.families import words

_SUFFIXES = ('.log', '.csv', '.txt', '.dat', '.bak')


def by_size(rng: random.Random) -> Drawn:
  root, suffix, kib = words.folder(rng), rng.choice(_SUFFIXES), rng.randint(3, 12)
  out = f'{words.token(rng)}.txt'
  names = words.paths(rng, root, 18, (suffix, suffix, suffix.upper(), '.md'))
  sizes = [rng.choice((kib - 2, kib, kib + 1, kib + 3)) * 1024 for _ in names]
  sizes = [size + rng.choice((0, 1, -1, 200)) for size in sizes]
  files = {
    name: (words.prose(rng, 40) * 99).encode()[:size]
    for name, size in zip(names, sizes, strict=True)
  }
  large = [n for n, d in files.items() if n.endswith(suffix) and len(d) > kib * 1024]
  if not 2 <= len(large) <= 12:
    raise Degenerate(f'{len(large)} files are large')
  return Drawn(
    files=files,
    values={'root': root, 'suffix': suffix, 'kib': str(kib), 'out': out},
    indirect={'root': 'the only folder here that has files of several sizes'},
    goal='Find the files in @root@, at any depth, whose name ends in "@suffix@" and '
    'that are larger than @kib@ KiB (1 KiB is 1024 bytes). Write their paths, as '
    'seen from the workspace, to @out@.',
    steps=(
      'Use find with -type f, -name and -size on @root@.',
      'Redirect its output to @out@.',
    ),
    format='Lists of files have one path per line, relative to this folder and without '
    './ in front, in any order.',
    constraint='The case of the ending matters, and a file of exactly @kib@ KiB is not '
    'larger than @kib@ KiB.',
    commands=(
      "find @root@ -type f -name '*@suffix@' -size +@kib@k > /tmp/found",
      'sort /tmp/found > @out@',
    ),
    end={out: content(''.join(f'{n}\n' for n in sorted(large)), 'lines')},
    slips=(('-size +', '-size -'), ('-name', '-iname'), (' +@kib@k', ' +@kib@M')),
    example="find @root@ -name '*@suffix@' > @out@",
  )


def by_age(rng: random.Random) -> Drawn:
  root, old, day = words.folder(rng), f'old-{words.token(rng)}', words.date(rng)
  names = [f'{root}/{words.token(rng, 1)}-{i}.{rng.choice(("log", "tmp"))}'
           for i in range(12)]  # fmt: skip
  files = {name: words.prose(rng, 12).encode() for name in names}
  year, rest = int(day[:4]), day[4:]
  # Around midnight of the day, in UTC.
  times = [f'{year - 1}{rest} 12:00', f'{day} 00:00:02', f'{day} 23:00:00',
           f'{year + 1}{rest} 08:00', f'{year - 2}{rest} 23:59']  # fmt: skip
  given = {name: times[i % 5] for i, name in enumerate(names)}
  setup = ''.join(f"touch -d '{time}' '{name}'\n" for name, time in given.items())
  moved = [n for n in names if given[n] < day and n.endswith('.log')]
  if not moved:
    raise Degenerate('no file is old')
  end = dict.fromkeys(moved)
  end |= {f'{old}/{n.rpartition("/")[2]}': content(files[n].decode()) for n in moved}
  return Drawn(
    files=files,
    values={'root': root, 'old': old, 'day': day},
    indirect={'root': 'the folder of logs'},
    goal='Move the .log files in @root@ that were last modified before @day@ (midnight '
    'at the beginning of that day, UTC) into a new folder @old@, under their names.',
    steps=(
      'Make the folder @old@ with mkdir.',
      'Move what find -newermt does not find.',
    ),
    format='Files that are moved keep their names and contents.',
    constraint='A file that was modified on @day@ stays where it is.',
    commands=(
      'mkdir @old@',
      "find @root@ -type f -name '*.log' ! -newermt '@day@' -exec mv -t @old@ {} +",
    ),
    end=end,
    slips=(('! -newermt', '-newermt'), ("'*.log'", "'*'")),
    example='mkdir -p @old@; find @root@ -mtime +30 -exec mv -t @old@ {} +',
    setup=setup,
  )


def links(rng: random.Random) -> Drawn:
  root, out = words.folder(rng), f'{words.token(rng)}.txt'
  names = [f'{root}/{words.token(rng, 1)}{i}.txt' for i in range(5)]
  files = {name: words.prose(rng, 15).encode() for name in names}
  state, broken = {}, []
  for i, noun in enumerate(rng.sample(words.NOUNS, rng.randint(6, 9))):
    path = f'{root}/{rng.choice(("", "current/"))}{noun}-link'
    up = '../' if '/current/' in path else ''
    good = i % 2 == 0
    target = up + (rng.choice(names).rpartition('/')[2] if good else f'gone-{i}.txt')
    state[path] = link(target)
    broken += [] if good else [path]
  made = ''.join(f"ln -s '{e['target']}' '{p}'\n" for p, e in state.items())
  text = ''.join(f'{p}\n' for p in sorted(broken))
  return Drawn(
    files={**files, f'{root}/current/keep.txt': b'kept\n'},
    values={'root': root, 'out': out},
    indirect={'root': 'the folder that has symbolic links'},
    goal='Remove the symbolic links in @root@, at any depth, whose target does not '
    'exist, and write the paths of those that were removed to @out@.',
    steps=(
      'List them with find -xtype l, sorted, into @out@.',
      'Remove them with find -xtype l -delete.',
    ),  # fmt: skip
    format='Lists of links have one path per line, relative to this folder and without '
    './ in front, sorted by bytes (LC_ALL=C).',
    constraint='Links that work, in folders below it as well, must stay links.',
    commands=(
      'find @root@ -xtype l > /tmp/broken',
      'sort /tmp/broken > @out@',
      'find @root@ -xtype l -delete',
    ),
    end={out: content(text), **dict.fromkeys(broken)},
    slips=(('-xtype', '-type'), ('find @root@', 'find @root@ -maxdepth 1')),
    example='find @root@ -type l > @out@; find @root@ -type l -delete',
    setup=made,
    state=state,
  )


def permissions(rng: random.Random) -> Drawn:
  root = words.folder(rng)
  files, state, end, setup = {}, {}, {}, ''
  for i, path in enumerate(words.paths(rng, root, 12, ('', '.sh', '.txt', '.py'))):
    program = rng.random() < 0.5
    first = rng.choice(('#!/bin/sh', '#!/usr/bin/env python3')) if program else 'notes'
    text = f'{first}\n' + ('# #!/bin/sh\n' if i % 3 == 0 else '') + 'echo done\n'
    mode = rng.choice((0o600, 0o644, 0o664, 0o755, 0o775))
    files[path], state[path] = text.encode(), {'mode': mode}
    setup += f"chmod {mode:o} '{path}'\n"
    end[path] = content(text, mode=0o755 if program else 0o644)
  return Drawn(
    files=files,
    values={'root': root},
    indirect={'root': 'the only folder here'},
    goal='Set the permissions of the files in @root@, at any depth: 755 for those '
    'whose first line begins with "#!", and 644 for all others.',
    steps=(
      'Set all to 644 with find and chmod.',
      'Set those to 755 whose first two characters are #!.',
    ),  # fmt: skip
    format='Permissions are octal, as chmod takes them.',
    constraint='The name of a file does not tell; "#!" in a later line does not count.',
    commands=(
      'find @root@ -type f -exec chmod 644 {} +',
      'find @root@ -type f -exec sh -c \'for f; do [ "$(head -c 2 "$f")" = "#!" ] && '
      'chmod 755 "$f"; done; true\' sh {} +',
    ),
    end=end,
    slips=(('644', '664'), ('755', '775'), ('755', 'u+x'), ('head -c 2', 'tail -c 2')),
    example="find @root@ -name '*.sh' -exec chmod 755 {} +",
    setup=setup,
    state=state,
  )


def rename(rng: random.Random) -> Drawn:
  root, prefix = words.folder(rng), rng.choice(words.NOUNS)
  stem = rng.choice(('IMG', 'DSC', 'SCAN', 'PIC'))
  numbers = rng.sample(range(1, 9999), 9)
  old = {
    f'{root}/{stem}_{n:04}.{rng.choice(("JPG", "JPG", "PNG"))}': n for n in numbers
  }
  files = {path: f'image {n}\n'.encode() for path, n in old.items()}
  files |= {f'{root}/{stem}_notes.TXT': b'notes\n', f'{root}/X{stem}_0001.JPG': b'x\n'}
  end = {}
  for path, n in old.items():
    if path.endswith('.JPG'):
      end[path] = None
      end[f'{root}/{prefix}-{n:04}.jpg'] = content(files[path].decode())
  if not end:
    raise Degenerate('no file is to be renamed')
  return Drawn(
    files=files,
    values={'root': root, 'stem': stem, 'prefix': prefix},
    indirect={'root': 'the folder of images'},
    goal='In @root@, rename every file @stem@_NUMBER.JPG to @prefix@-NUMBER.jpg, where '
    'NUMBER are the same four digits.',
    steps=('Loop over @stem@_[0-9]*.JPG in the shell.', 'Rename with mv.'),
    format='Files that are renamed keep their contents.',
    constraint='Files with other endings or other beginnings keep their names.',
    commands=(
      'ls @root@ > /tmp/names',
      "grep -E '^@stem@_[0-9]{4}[.]JPG$' /tmp/names > /tmp/chosen",
      'while read -r f; do n=${f#@stem@_}; '
      'mv "@root@/$f" "@root@/@prefix@-${n%.JPG}.jpg"; done < /tmp/chosen',
    ),
    end=end,
    slips=(('[.]JPG$', '[.]'), ("'^@stem@", "'@stem@"), ('.jpg"', '.JPG"')),
    example='for f in @root@/*.JPG; do mv "$f" "${f%.JPG}.jpg"; done',
  )


def dedupe(rng: random.Random) -> Drawn:
  root, out = words.folder(rng), f'{words.token(rng)}.txt'
  texts = [words.prose(rng, 20) for _ in range(5)]
  names = words.paths(rng, root, 13, ('.txt', '.md'))
  files = {name: texts[rng.randrange(5)].encode() for name in names}
  kept, gone = {}, []
  for name in sorted(names):
    if files[name] in kept:
      gone.append(name)
    kept.setdefault(files[name], name)
  if not gone or any('\\' in n for n in names):
    raise Degenerate('no file is there twice')
  return Drawn(
    files=files,
    values={'root': root, 'out': out},
    indirect={'root': 'the only folder here'},
    goal='In @root@, at any depth, keep one file of every content: the one whose path '
    'is first when paths are sorted by bytes (LC_ALL=C). Remove the others, and write '
    'their paths to @out@.',
    steps=(
      'Compute checksums with sha256sum, in the order of sorted paths.',
      'Write the paths whose checksum was seen before to @out@ with awk.',
      'Remove these files with xargs rm.',
    ),  # fmt: skip
    format='Lists of files have one path per line, relative to this folder and without '
    './ in front, in any order.',
    constraint='Names may have spaces, and equal names in two folders say nothing.',
    commands=(
      'find @root@ -type f -print0 | sort -z | xargs -0 sha256sum > /tmp/sums',
      "awk 'seen[$1]++ { print substr($0, 67) }' /tmp/sums > @out@",
      "tr '\\n' '\\0' < @out@ | xargs -0 rm",
    ),
    end={out: content(''.join(f'{n}\n' for n in gone), 'lines'), **dict.fromkeys(gone)},
    slips=(
      ('sort -z', 'sort -zr'),
      ('seen[$1]++', '!seen[$1]++'),
      (' > @out@', ' >> @out@'),
    ),
    example='find @root@ -type f | xargs sha256sum | sort | uniq -d -w 64 > @out@',
  )


FAMILIES = (
  Family('find_size', 'find', (r'-size\b',), by_size),
  Family('find_age', 'find', (r'-newer|-mtime|-mmin',), by_age),
  Family(
    'links', 'find', (r'-xtype|broken symbolic|symbolic link', r'\bfind\b'), links
  ),
  Family('permissions', 'chmod', (r'\bchmod\b', r'\bfiles?\b'), permissions),
  Family('rename', 'mv', (r'\brenam(?:e|ing)', r'\bfiles?\b'), rename),
  Family('dedupe', 'sha256sum', (r'duplicate|identical|\buniq', r'duplicate'), dedupe),
)
