"""Families that select files by what find tests: size, age, links, permissions."""

from __future__ import annotations

import random

from m2jax.pipelines.terminal_gym.drawn import Degenerate, Drawn, Family, content, link
from m2jax.pipelines.terminal_gym.families import words

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


FAMILIES = (Family('find_size', 'find', (r'-size\b',), by_size),)
