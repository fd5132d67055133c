"""Second solvers of `reasoning`: words, families, dates and logic.

As `recheck_numbers`: from the text of a problem alone, None where it leaves the answer
open.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import re
from collections.abc import Callable, Sequence

_WEEKDAYS = 'Monday Tuesday Wednesday Thursday Friday Saturday Sunday'.split()
_MONTHS = (
  'January February March April May June July August September October November '
  'December'
).split()
_DAY = '|'.join(_WEEKDAYS)
_DATE = (
  rf'(?:(?P<weekday>{_DAY}), )?(?P<month>{"|".join(_MONTHS)}) (?P<day>\d+)'
  r'(?:, (?P<year>\d{4}))?'
)
_MEN = set(
  'James John Robert Michael William David Richard Joseph Thomas Charles Peter Daniel '
  'Matthew Christopher Andrew George Edward Benjamin Henry Samuel Alexander Oliver '
  'Jack Harry Jacob Noah Ethan Lucas Mason Logan Sebastian Theodore Owen Liam Aiden '
  'Jayden Axel Ryder Finn'.split()
)
_WOMEN = set(
  'Mary Patricia Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Emma Lisa '
  'Anna Margaret Victoria Charlotte Sophia Isabella Olivia Ava Mia Emily Abigail '
  'Amelia Eleanor Grace Alice Lucy Chloe Sophie Lily Hannah Zoe Luna Nova Aria Willow '
  'Aurora'.split()
)


def letters(text: str) -> int:
  """How often a letter is in a text."""
  letter, shown = re.search(r'letter "(.)" .*?text: "(.*)"', text, re.DOTALL).groups()
  return shown.lower().count(letter.lower())


def backward(text: str) -> str:
  """A word, spelled backward."""
  return re.search(r':\s*(\S+)\s*$', text).group(1)[::-1]


def words(text: str) -> str:
  """Words in the order of their code points."""
  order, listed = re.search(
    r'sort these words in (\w+) order .*? list: (.*)$', text, re.DOTALL
  ).groups()
  found = sorted(listed.strip().split(', '), reverse=order == 'descending')
  return ', '.join(found)


def note(text: str) -> str:
  """Whether a magazine has the letters of a note."""
  wanted, has = re.search(r'note: (\w*)\s+Magazine: (\w*)', text).groups()
  return str(not collections.Counter(wanted) - collections.Counter(has))


def isomorphic(text: str) -> str:
  """Whether letters of one word can be replaced one by one to get another."""
  one, other = text.splitlines()[-1].split()
  pairs = set(zip(one, other, strict=True))
  return str(len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}))


def circle(text: str) -> str | None:
  """Sisters of a brother, female friends of a friend, or colleagues of a colleague.

  A woman's brother has her sisters, and herself, as sisters. A man who is friends with
  her and with all her friends has her as one more female friend. For colleagues, None:
  whether those of a second circle count depends on how the text is read.
  """
  if found := re.search(r'(\d+) sisters', text):
    return str(int(found.group(1)) + 1)
  if found := re.search(r'(\d+) female friends', text):
    return str(int(found.group(1)) + 1)
  return None


def family(text: str) -> str | None:
  """What one person is to another."""
  married = [frozenset(p) for p in re.findall(r'(\w+) is married to (\w+)', text)]
  parents: dict[str, frozenset[str]] = {}
  for couple, after in zip(
    married, re.split(r'\w+ is married to \w+\.', text)[1:], strict=True
  ):
    if named := re.match(r' They have (?:a child|children) called ([^.]*)\.', after):
      for child in re.split(r', | and ', named.group(1)):
        parents[child] = couple
  asked = text.splitlines()[-1]
  one, other = re.search(r'is (\w+) (?:related )?to (\w+)\?', asked).groups()
  woman = _is_woman(one, married)
  kind = _relation(one, other, parents, married)
  if woman is None or kind is None:
    return None
  return _RELATIONS[kind][woman]


_RELATIONS = {
  'parent': ('father', 'mother'),
  'child': ('son', 'daughter'),
  'spouse': ('husband', 'wife'),
  'sibling': ('brother', 'sister'),
  'grandparent': ('grandfather', 'grandmother'),
  'grandchild': ('grandson', 'granddaughter'),
  "parent's sibling": ('uncle', 'aunt'),
  "sibling's child": ('nephew', 'niece'),
  "spouse's parent": ('father-in-law', 'mother-in-law'),
  "child's spouse": ('son-in-law', 'daughter-in-law'),
}


def _is_woman(name: str, married: Sequence[frozenset[str]]) -> bool | None:
  """By the name, else by that of the spouse; None if neither decides."""
  if name in _MEN or name in _WOMEN:
    return name in _WOMEN
  for couple in married:
    (spouse,) = couple - {name} if name in couple else (None,)
    if spouse in _MEN or spouse in _WOMEN:
      return spouse in _MEN
  return None


def _relation(one, other, parents, married) -> str | None:
  def of(people):
    return {p for person in people for p in parents.get(person, ())}

  def spouse(person):
    return {p for couple in married if person in couple for p in couple - {person}}

  def siblings(people):
    return {
      person
      for person, theirs in parents.items()
      for other in people
      if theirs == parents.get(other) and person != other
    }

  found = {
    'parent': one in of({other}),
    'child': other in of({one}),
    'spouse': one in spouse(other),
    'sibling': one in siblings({other}),
    'grandparent': one in of(of({other})),
    'grandchild': other in of(of({one})),
    "parent's sibling": one in siblings(of({other})),
    "sibling's child": other in siblings(of({one})),
    "spouse's parent": one in of(spouse(other)),
    "child's spouse": other in of(spouse(one)),
  }
  return next((kind for kind, holds in found.items() if holds), None)


def syllogism(text: str) -> str:
  """Whether a conclusion is true in every world where the premises are.

  A world is the set of kinds of things that there are, each in some of the three terms;
  something is in each term, as in Aristotle's logic.
  """
  lines = re.findall(r'(All|No|Some) (\w+) are (not )?(\w+)', text)
  terms = sorted({term for _, a, _, b in lines for term in (a, b)})
  kinds = list(itertools.product((False, True), repeat=len(terms)))[1:]
  for there in itertools.product((False, True), repeat=len(kinds)):
    world = [
      dict(zip(terms, kind, strict=True))
      for kind, is_there in zip(kinds, there, strict=True)
      if is_there
    ]
    if not all(any(thing[term] for thing in world) for term in terms):
      continue
    *premises, conclusion = (_holds(line, world) for line in lines)
    if all(premises) and not conclusion:
      return 'No'
  return 'Yes'


def _holds(line: tuple[str, str, str, str], world) -> bool:
  quantity, one, negated, other = line
  of = [thing[other] != bool(negated) for thing in world if thing[one]]
  return {'All': all(of), 'No': not any(of), 'Some': any(of)}[quantity]


def statements(text: str) -> str:
  """How many assignments of true and false fit statements about each other."""
  said = re.findall(r"Statement \d+: '(.*?)'", text)
  rules = [_rule(one) for one in said]
  count = 0
  for truth in itertools.product((False, True), repeat=len(said)):
    count += all(rule(truth) == t for rule, t in zip(rules, truth, strict=True))
  return str(count)


def _rule(said: str) -> Callable[[tuple[bool, ...]], bool]:
  if found := re.match(
    r'(At least|At most|Exactly) (\d+) of .* are (true|false)', said
  ):
    compare, number, value = (
      found.group(1),
      int(found.group(2)),
      found.group(3) == 'true',
    )
    return lambda truth: {
      'At least': truth.count(value) >= number,
      'At most': truth.count(value) <= number,
      'Exactly': truth.count(value) == number,
    }[compare]
  if found := re.match(
    r'Either Statement (\d) or Statement (\d) is true, but not', said
  ):
    one, other = (int(n) - 1 for n in found.groups())
    return lambda truth: truth[one] != truth[other]
  value, prime = re.match(r'The number of (\w+) statements is a (\w+)', said).groups()

  def divided(n: int) -> bool:
    return any(n % d == 0 for d in range(2, n))

  return lambda truth: (
    (n := truth.count(value == 'true')) > 1 and (divided(n) == (prime == 'composite'))
  )


def calendar(text: str) -> str | None:
  """A question about dates; None where the text contradicts the calendar."""
  if found := re.search(r'(\d+) is a leap year|Is (\d+) a leap', text):
    return 'Yes' if _leap(int(found.group(1) or found.group(2))) else 'No'
  if found := re.search(r'(\d+)/(\d+)/(\d{4})', text):
    month, day, year = map(int, found.groups())
    return _weekday(datetime.date(year, month, day))
  if re.search(r'first day of the year|January 1(?:st| fell)', text):
    return _from_new_year(text)
  if found := re.search(rf'(first|second|third|fourth|last) ({_DAY})', text):
    return _nth(text, *found.groups())
  dates = _dates(text)
  if dates is None:
    return None
  if found := re.search(r'(\d+)(?: days|-day)', text):
    back = re.search('backward|ago|before', text)
    days = int(found.group(1)) * (-1 if back else 1)
    return _weekday(dates[0] + datetime.timedelta(days))
  if len(dates) == 1:
    return _weekday(dates[0])
  span = (dates[1] - dates[0]).days + 1
  all_ = [_weekday(dates[0] + datetime.timedelta(i)) for i in range(span)]
  if 'business' in text or 'excluding weekends' in text:
    return str(sum(day in _WEEKDAYS[:5] for day in all_))
  (asked,) = re.findall(rf'({_DAY})s are|occurrences of ({_DAY})|does ({_DAY})', text)
  return str(all_.count(''.join(asked)))


def _dates(text: str) -> list[datetime.date] | None:
  """The dates of a text; None if one has another weekday than the text says."""
  found = list(re.finditer(_DATE, text))
  year = next(int(date['year']) for date in found if date['year'])
  dates = []
  for named in found:
    month = _MONTHS.index(named['month']) + 1
    date = datetime.date(int(named['year'] or year), month, int(named['day']))
    if named['weekday'] not in (None, _weekday(date)):
      return None
    dates.append(date)
  return dates


def _from_new_year(text: str) -> str | None:
  """A weekday by that of January 1; None if it depends on the year's leap day."""
  (start,) = set(re.findall(_DAY, text.partition('?')[0].partition('. ')[0])) or (None,)
  dates = list(
    re.finditer(_DATE, text.replace('January 1st', '').replace('January 1 ', ''))
  )
  month, day = _MONTHS.index(dates[0]['month']) + 1, int(dates[0]['day'])
  passed = [
    (datetime.date(year, month, day) - datetime.date(year, 1, 1)).days % 7
    for year in (2022, 2024)
  ]
  if passed[0] != passed[1]:
    return None
  return _WEEKDAYS[(_WEEKDAYS.index(start) + passed[0]) % 7]


def _nth(text: str, which: str, weekday: str) -> str:
  month, year = re.search(rf'({"|".join(_MONTHS)}) (\d{{4}})', text).groups()
  day = datetime.date(int(year), _MONTHS.index(month) + 1, 1)
  days = []
  while day.month == _MONTHS.index(month) + 1:
    if _weekday(day) == weekday:
      days.append(day.day)
    day += datetime.timedelta(1)
  place = ('first', 'second', 'third', 'fourth', 'last').index(which)
  return str(days[-1 if place == 4 else place])


def _weekday(date: datetime.date) -> str:
  return _WEEKDAYS[date.weekday()]


def _leap(year: int) -> bool:
  return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
