"""Families on lines and columns: tables, logs, counts, dates, conversions."""

from __future__ import annotations

import collections
import json
import random

from m2jax_pipelines.terminal_gym.drawn import Degenerate, Drawn, Family, content
from m2jax_pipelines.terminal_gym.families import words

_LEVELS = ('DEBUG', 'INFO', 'WARN', 'ERROR')


def _table(rows, separator: str) -> bytes:
  return ''.join(separator.join(map(str, row)) + '\n' for row in rows).encode()


def columns(rng: random.Random) -> Drawn:
  path, out = f'{words.folder(rng)}/people.txt', f'{words.token(rng)}.csv'
  shells = '/bin/bash', '/bin/sh', '/usr/sbin/nologin', '/bin/bash-static'
  rows = [
    (n.lower(), 'x', 1000 + i, rng.choice((100, 1000)),
     f'{n} {rng.choice(words.TOWNS)}', f'/home/{n.lower()}', rng.choice(shells))
    for i, n in enumerate(rng.sample(words.PEOPLE, 16))
  ]  # fmt: skip
  shell = shells[rng.randrange(2)]
  found = [(r[0], r[2], r[4]) for r in rows if r[6] == shell]
  if len(found) < 2:
    raise Degenerate('hardly any row is chosen')
  return Drawn(
    files={path: _table(rows, ':'), f'{path}.old': _table(rows[:5], ':')},
    values={'path': path, 'shell': shell, 'out': out},
    indirect={'path': 'the list of accounts that is not the .old one'},
    goal='@path@ is a table with ":" between its columns. Of the rows whose seventh '
    'column is @shell@, write columns 1, 3 and 5 to @out@, in the order of the table.',
    steps=(
      'Set the input separator of awk to ":" and the output separator to ",".',
      'Compare $7, and print $1, $3 and $5 to @out@.',
    ),  # fmt: skip
    format='Tables that are written have "," between the columns, and no header.',
    constraint='The seventh column must be equal to @shell@, not only contain it.',
    commands=(
      'awk -F: -v OFS=, \'$7 == "@shell@" { print $1, $3, $5 }\' @path@ > /tmp/rows',
      'cat /tmp/rows > @out@',
    ),
    end={out: content(_table(found, ',').decode())},
    slips=(('$7 ==', '$7 ~'), ('-v OFS=,', '-v OFS=:'), ('$1, $3, $5', '$1, $2, $5')),
    example='grep @shell@ @path@ | cut -d: -f1,3,5 > @out@',
  )


def counts(rng: random.Random) -> Drawn:
  path, out = f'{words.folder(rng)}/access.log', f'{words.token(rng)}.txt'
  hosts = [f'10.{rng.randint(0, 9)}.{rng.randint(0, 99)}.{i}' for i in range(1, 9)]
  log = []
  for _ in range(120):
    host = rng.choice(hosts[: rng.randint(1, 8)])
    status = rng.choice((200, 200, 200, 304, 404, 500))
    where = f'/{rng.choice(words.NOUNS)}?code={rng.choice((404, 500, 200))}'
    log.append(
      f'{host} {words.date(rng)} "GET {where}" {status} {rng.randint(99, 9999)}'
    )
  status, top = rng.choice((200, 404, 500)), rng.randint(2, 4)
  tally = collections.Counter(x.split()[0] for x in log if x.split()[4] == str(status))
  ranked = sorted(tally.items(), key=lambda item: (-item[1], item[0].encode()))
  if len(ranked) <= top:
    raise Degenerate('hardly any host')
  return Drawn(
    files={path: ('\n'.join(log) + '\n').encode()},
    values={'path': path, 'status': str(status), 'top': str(top), 'out': out},
    indirect={'path': 'the log'},
    goal='In @path@ the fifth word of a line is the status, the first is the host. '
    'Count the lines with status @status@ of each host, and write the @top@ hosts with '
    'the most to @out@.',
    steps=(
      'Print the first word of the lines whose fifth word is @status@, with awk.',
      'Count with sort and uniq -c, then sort by the count, and take the head.',
    ),  # fmt: skip
    format='Counts are written as "COUNT NAME", one per line, the highest first; equal '
    'counts in the order of the names by bytes (LC_ALL=C). More spaces do not matter.',
    constraint='Numbers in the requested address are not the status.',
    commands=(
      "awk '$5 == @status@ { print $1 }' @path@ > /tmp/hosts",
      'sort /tmp/hosts | uniq -c | sort -k1,1nr -k2,2 > /tmp/counts',
      'head -n @top@ /tmp/counts > @out@',
    ),
    end={out: content(''.join(f'{n} {h}\n' for h, n in ranked[:top]), 'words')},
    slips=(
      ('$5 ==', '$0 ~'),
      ('-k1,1nr', '-k1,1n'),
      ('head -n', 'tail -n'),
      ('uniq -c', 'uniq'),
    ),
    example='grep @status@ @path@ | cut -d" " -f1 | sort | uniq -c | sort -rn | '
    'head -n @top@ > @out@',
  )


def join(rng: random.Random) -> Drawn:
  root, out = words.folder(rng), f'{words.token(rng)}.csv'
  ids = rng.sample(range(1, 2000), 14)
  people = [(i, rng.choice(words.PEOPLE)) for i in ids[:11]]
  orders = [(i, rng.choice(words.TOWNS)) for i in ids[3:]]
  rng.shuffle(orders)
  towns = dict(orders)
  both = [(i, name, towns[i]) for i, name in people if i in towns]
  both.sort(key=lambda row: str(row[0]).encode())
  left, right = f'{root}/people.csv', f'{root}/towns.csv'
  return Drawn(
    files={left: _table(people, ','), right: _table(orders, ',')},
    values={'left': left, 'right': right, 'out': out},
    indirect={'left': 'the table of people', 'right': 'the table of towns'},
    goal='@left@ has lines "id,name" and @right@ has lines "id,town". Write a line '
    '"id,name,town" to @out@ for every id that both have.',
    steps=('Sort both tables by their first column.', 'Join them with join -t,.'),
    format='Tables that are written have "," between the columns, no header, and are '
    'sorted by the first column as text, by bytes (LC_ALL=C).',
    constraint='An id that only one table has is left out.',
    commands=(
      'sort -t, -k1,1 @left@ > /tmp/left',
      'sort -t, -k1,1 @right@ > /tmp/right',
      'join -t, /tmp/left /tmp/right > @out@',
    ),
    end={out: content(_table(both, ',').decode())},
    slips=(('join -t,', 'join -a1 -t,'), ('-k1,1', '-k2,2'), ('-k1,1', '-k1,1nr')),
    example='join -t, @left@ @right@ > @out@',
  )


def log_days(rng: random.Random) -> Drawn:
  root, out, level = (
    words.folder(rng),
    f'{words.token(rng)}.csv',
    rng.choice(_LEVELS[1:]),
  )
  days = sorted({words.date(rng, 2024, 2024) for _ in range(6)})
  files, tally = {}, collections.Counter()
  for i in range(3):
    log = []
    for _ in range(40):
      day, shown = rng.choice(days), rng.choice(_LEVELS)
      said = rng.choice((*_LEVELS, 'request', 'retry'))
      time = f'{rng.randint(0, 23):02}:{rng.randint(0, 59):02}'
      log.append(f'{day}T{time} {shown} {said} {words.token(rng)}')  # fmt: skip
      tally[day] += shown == level
    files[f'{root}/app.{i}.log'] = ('\n'.join(log) + '\n').encode()
  rows = [(day, n) for day, n in sorted(tally.items()) if n]
  if len(rows) < 2:
    raise Degenerate('the level is hardly there')
  return Drawn(
    files=files,
    values={'root': root, 'level': level, 'out': out},
    indirect={'root': 'the folder of logs'},
    goal='Lines of the .log files in @root@ begin with "DATETtime LEVEL". Count the '
    'lines with level @level@ of each date over all files, and write them to @out@.',
    steps=(
      'Print the first 10 characters of lines whose second word is @level@, with awk.',
      'Count them with sort and uniq -c.',
      'Turn the columns with awk.',
    ),  # fmt: skip
    format='Counts per date are written as "DATE,COUNT", one per line, the earliest '
    'date first; dates without any are left out.',
    constraint='A message may contain the name of a level; only the second word '
    'counts.',
    commands=(
      'awk \'$2 == "@level@" { print substr($1, 1, 10) }\' @root@/*.log > /tmp/days',
      'sort /tmp/days | uniq -c > /tmp/counts',
      'awk \'{ print $2 "," $1 }\' /tmp/counts > @out@',
    ),
    end={out: content(_table(rows, ',').decode())},
    slips=(
      ('$2 ==', '$0 ~'),
      ('1, 10', '1, 7'),
      ('sort /tmp/days | ', 'cat /tmp/days | '),
      ('$2 ","', '$2 " "'),
    ),  # fmt: skip
    example='grep -h @level@ @root@/*.log | cut -c1-10 | sort | uniq -c > @out@',
  )


def dates(rng: random.Random) -> Drawn:
  path, out = f'{words.folder(rng)}/sales.csv', f'{words.token(rng)}.txt'
  rows = [(words.date(rng), rng.choice(words.TOWNS[:6]), rng.randint(5, 900))
          for _ in range(50)]  # fmt: skip
  first, last = sorted(rng.sample([row[0] for row in rows], 2))
  town = rng.choice(words.TOWNS[:6])
  total = sum(n for day, place, n in rows if first <= day <= last and place == town)
  if not total:
    raise Degenerate('nothing is in the range')
  return Drawn(
    files={path: b'date,town,amount\n' + _table(rows, ',')},
    values={'path': path, 'first': first, 'last': last, 'town': town, 'out': out},
    indirect={'path': 'the table of sales'},
    goal='@path@ has lines "date,town,amount" and a header. Write the total amount of '
    '@town@ from @first@ to @last@, both included, to @out@.',
    steps=(
      'Select the lines of @town@ with grep.',
      'Add the third column where the date is in the range, with awk.',
    ),  # fmt: skip
    format='A total is written as one whole number on a line of its own.',
    constraint='Both days of the range count.',
    commands=(
      "grep ',@town@,' @path@ > /tmp/rows",
      'awk -F, \'$1 >= "@first@" && $1 <= "@last@" { n += $3 } END { print n }\' '
      '/tmp/rows > @out@',
    ),
    end={out: content(f'{total}\n', 'words')},
    slips=(('>=', '>'), ('<=', '<'), ('$3', '1'), ("grep ',@town@,'", 'cat')),
    example="awk -F, '{ n += $3 } END { print n }' @path@ > @out@",
  )


def csv_json(rng: random.Random) -> Drawn:
  path, out = f'{words.folder(rng)}/stock.csv', f'{words.token(rng)}.json'
  items = rng.sample(words.NOUNS, rng.randint(5, 9))
  rows = [(x, rng.randint(0, 500), rng.choice(words.TOWNS)) for x in items]
  names = 'item', 'count', 'town'
  value = [dict(zip(names, row, strict=True)) for row in rows]
  return Drawn(
    files={path: _table([names, *rows], ',')},
    values={'path': path, 'out': out},
    indirect={'path': 'the table of the stock'},
    goal='Convert @path@, which has a header, to JSON in @out@: an array with an '
    'object for each row, in order, with the keys of the header. Values of "count" are '
    'numbers, all others are strings.',
    steps=(
      'Print an object for every row but the first, with awk.',
      'Put commas between them, and brackets around them, with paste and sed.',
    ),  # fmt: skip
    format='JSON may have any spaces and line ends, and keys in any order.',
    constraint='A count is a number, not a string of digits.',
    commands=(
      'tail -n +2 @path@ > /tmp/rows',
      'awk -F, \'{ printf "{\\"item\\":\\"%s\\",\\"count\\":%s,\\"town\\":'
      '\\"%s\\"}\\n", $1, $2, $3 }\' /tmp/rows > /tmp/objects',
      "paste -s -d, /tmp/objects | sed 's/^/[/; s/$/]/' > @out@",
    ),
    end={out: content(json.dumps(value), 'json')},
    slips=(
      ('tail -n +2', 'tail -n +1'),
      (':%s,', ':\\"%s\\",'),
      ('s/$/]/', ''),
      ('$1, $2', '$2, $1'),
    ),
    example='sed \'s/,/": "/g\' @path@ > @out@',
  )


FAMILIES = (
  Family('columns', 'awk', (r'column|field', r'\bcut\b|\bawk\b'), columns),
  Family('counts', 'uniq', (r'uniq -c|frequency|count the number of',), counts),
  Family('join', 'join', (r'\bjoin\b', r'\bfields?\b', r'\bsort'), join),
  Family('log_days', 'awk', (r'\bawk\b|\blogs?\b', r'\bsort|\bcount'), log_days),
  Family('dates', 'awk', (r'\bdates?\b', r'calendar|compar|between'), dates),
  Family(
    'csv_json', 'awk', (r'\bcommas?\b|\bcsv\b|delimited', r'split|field'), csv_json
  ),
)
