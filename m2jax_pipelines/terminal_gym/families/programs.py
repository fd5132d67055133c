"""Families that ask for a program, which is run on hidden inputs.

The workspace has one example of an input. The program runs in a sandbox of its own,
without the tests (`tasks.harbor.runs`), on other inputs of the same kind: a program
that repeats the visible result fails.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from m2jax_pipelines.terminal_gym.drawn import Drawn, Family, content
from m2jax_pipelines.terminal_gym.families import words

_HIDDEN = 3
_INPUT = 'hidden-input'


def _sales(rng: random.Random) -> tuple[str, str]:
  """(CSV, totals by town)."""
  rows = [(words.date(rng), rng.choice(words.TOWNS[:7]), rng.randint(1, 999))
          for _ in range(rng.randint(10, 40))]  # fmt: skip
  totals = collections.Counter()
  for _, town, amount in rows:
    totals[town] += amount
  text = 'date,town,amount\n' + ''.join(f'{d},{t},{n}\n' for d, t, n in rows)
  return text, ''.join(f'{t} {n}\n' for t, n in sorted(totals.items()))


def _frequent(top: int):
  def drawn(rng: random.Random) -> tuple[str, str]:
    """(text, its most frequent words)."""
    text = words.prose(rng, rng.randint(60, 150))
    if rng.random() < 0.5:
      text = text.title()
    ranked = collections.Counter(text.lower().split()).items()
    ranked = sorted(ranked, key=lambda item: (-item[1], item[0]))[:top]
    return text, ''.join(f'{w} {n}\n' for w, n in ranked)

  return drawn


def _drawn(rng, make, path: str, shown: str, **more) -> Drawn:
  text, _ = make(rng)
  return Drawn(
    files={shown: text.encode()},
    end={path: content('', 'any')},
    run=f'bash {path} {_INPUT}',
    **_hidden(rng, make),
    **more,
  )


def _hidden(rng, make) -> dict[str, tuple]:
  made = [make(rng) for _ in range(_HIDDEN)]
  return {
    'inputs': tuple({_INPUT: text.encode()} for text, _ in made),
    'outputs': tuple(result for _, result in made),
  }


def hide_totals(rng: random.Random, drawn: Drawn) -> Drawn:
  return dataclasses.replace(drawn, **_hidden(rng, _sales))


def hide_frequent(rng: random.Random, drawn: Drawn) -> Drawn:
  make = _frequent(int(drawn.values['top']))
  return dataclasses.replace(drawn, **_hidden(rng, make))


def totals(rng: random.Random) -> Drawn:
  path, shown = f'tools/{words.token(rng)}.sh', f'{words.folder(rng)}/sales.csv'
  return _drawn(
    rng,
    _sales,
    path,
    shown,
    values={'path': path, 'shown': shown},
    indirect={'shown': 'the table of sales in this workspace'},
    goal='Write a bash script @path@ that takes the path of a table as its argument '
    'and prints the total amount of each town. @shown@ is an example of such a table; '
    'the script is tried with others.',
    steps=(
      'Leave out the header, and add $3 in an array by $2, with awk -F,.',
      'Print names and totals, sorted.',
    ),  # fmt: skip
    format='Totals are printed as "NAME TOTAL", one per line, in the order of the '
    'names by bytes (LC_ALL=C), to standard output.',
    constraint='The script changes no files.',
    commands=(
      'mkdir -p tools',
      "printf '%s\\n' 'tail -n +2 \"$1\" |' > @path@",
      'echo \'awk -F, "{ n[\\$2] += \\$3 } END { for (k in n) print k, n[k] }" |\' '
      '>> @path@',
      "echo 'LC_ALL=C sort' >> @path@",
    ),
    slips=(('+2', '+1'), ("'LC_ALL=C sort'", "'LC_ALL=C sort -k2n'"), ('+= ', '= ')),
    example='mkdir -p tools; echo \'awk -F, "{ print \\$2, \\$3 }" "$1"\' > @path@',
  )


def frequent(rng: random.Random) -> Drawn:
  path, shown = f'tools/{words.token(rng)}.sh', f'{words.folder(rng)}/letter.txt'
  top = rng.randint(3, 6)
  return _drawn(
    rng,
    _frequent(top),
    path,
    shown,
    values={'path': path, 'shown': shown, 'top': str(top)},
    indirect={'shown': 'the letter in this workspace'},
    goal='Write a bash script @path@ that takes the path of a text as its argument and '
    'prints the @top@ most frequent words of it, with their counts. @shown@ is an '
    'example of such a text; the script is tried with others.',
    steps=(
      'Put every word on a line with tr, in lower case.',
      'Count with sort and uniq -c, and sort by the counts.',
    ),  # fmt: skip
    format='Counts are printed as "WORD COUNT", one per line, in lower case, the '
    'highest count first; equal counts in the order of the words by bytes (LC_ALL=C).',
    constraint='Upper and lower case are the same word. The script changes no files.',
    commands=(
      'mkdir -p tools',
      "echo 'export LC_ALL=C' > @path@",
      'echo \'tr A-Z a-z < "$1" | tr -s " \\n" "\\n\\n" | sort | uniq -c |\' >> @path@',
      "echo 'sort -k1,1nr -k2,2 | head -n @top@ |' >> @path@",
      'echo \'while read -r n w; do echo "$w $n"; done\' >> @path@',
    ),
    slips=(('tr A-Z a-z <', 'cat <'), ('-k1,1nr', '-k1,1n'), ('"$w $n"', '"$n $w"')),
    example='mkdir -p tools; echo \'tr " " "\\n" < "$1" | sort | uniq -c\' > @path@',
  )


FAMILIES = (
  Family(
    'program_totals',
    'awk',
    (r'\bawk\b|\bsum', r'total|add|count'),
    totals,
    hide_totals,
  ),
  Family(
    'program_frequent',
    'uniq',
    (r'frequen|uniq -c|each word', r'word'),
    frequent,
    hide_frequent,
  ),
)
