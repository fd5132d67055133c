"""Slides: a deck from a table, judged by structure, layout and the chart's data.

facts/pipelines.md §5; docs/pipelines_cowork.md. `render` makes images of a deck where
LibreOffice is installed; the reward does not depend on it.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

from m2jax.tasks import harbor
from m2jax_pipelines import installed, introduction
from m2jax_pipelines.candidate import Candidate, PipelineConfig, attempted
from m2jax_pipelines.context import Context

_HERE = Path(__file__).parent
_SHARED = _HERE.parent / 'spreadsheets'
_SITE = 'slides'
_PACKAGES = (
  *('python-pptx', 'lxml', 'pillow', 'xlsxwriter', 'typing_extensions'),
  *('openpyxl', 'et_xmlfile'),
)
_VERIFIER = tuple('grade.py allowed.py charts.py fit.py look.py parts.py'.split())
_TEST = 'exec python3 -I -S -B "${M2JAX_TESTS:-/tests}/grade.py"\n'
_SOLVE = (
  'cd "${M2JAX_WORKSPACE:-/workspace}" && '
  'exec python3 "${M2JAX_SOLUTION:-/solution}/solve.py"\n'
)
# Topic → what the rows are; a topic is a source.
_TOPICS = {
  'Energy use': ('Heating', 'Lighting', 'Cooling', 'Machines', 'Transport', 'Offices'),
  'Visitors': ('January', 'February', 'March', 'April', 'May', 'June', 'July'),
  'Orders': ('Lamp', 'Desk', 'Chair', 'Shelf', 'Clock', 'Frame', 'Stool'),
  'Tickets': ('Network', 'Printer', 'Accounts', 'Hardware', 'Software', 'Phones'),
}


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """The settings of every pipeline."""

  kind: str = 'slides'
  dev: tuple[str, ...] = ('Orders',)
  held_out: tuple[str, ...] = ('Tickets',)
  near_duplicate: float = 0.6  # of the rows; what is asked about them is one thing


async def candidates(config: Config, context: Context) -> AsyncIterator[Candidate]:
  """Yields decks about the topics in turn, without end."""
  installed.site(context.directory('sites'), _SITE, _PACKAGES)
  topics, number = list(_TOPICS), 0
  while True:
    topic = topics[number % len(topics)]
    own = f'{topic.lower().replace(" ", "-")}/{number}'
    number += 1
    if own in context.done:
      continue
    context.say(topic)
    made = _candidate(config, context, topic, own)
    yield await attempted(made, own, 'deck', 'table-to-deck', topic)


async def _candidate(config, context, topic: str, own: str) -> Candidate:
  started = time.monotonic()
  draft = drafted(topic, random.Random(f'{config.seed}/{own}'), own)
  statement = await introduction.write(context.author, draft.instruction)
  draft = dataclasses.replace(draft.by(statement.by), instruction=statement.text)
  return Candidate(
    own,
    'deck',
    'table-to-deck',
    topic,
    draft=draft,
    text=draft.instruction,
    own=facts(draft),
    wall_s=time.monotonic() - started,
    facts={'author': statement.by},
  )


def drafted(topic: str, rng: random.Random, own: str) -> harbor.Draft:
  """The task of one table."""
  names = rng.sample(_TOPICS[topic], rng.randint(4, 6))
  values = rng.sample(range(10, 900), len(names))
  titles = [f'{topic} {rng.randint(2001, 2030)}', 'Summary', f'{topic} in numbers']
  best = names[values.index(max(values))]
  spec = {
    'slides': [
      {'title': titles[0], 'texts': []},
      {
        'title': titles[1],
        'texts': [str(sum(values)), best, str(max(values))],
        'others': [name for name in names if name != best],
      },
      {'title': titles[2], 'texts': []},
    ],
    'chart': {'slide': 3, 'categories': names, 'values': values},
  }
  rows = ''.join(f'{n},{v}\n' for n, v in zip(names, values, strict=True))
  return harbor.Draft(
    name='slides-' + own.replace('/', '-'),
    instruction=_instruction(titles),
    metadata=harbor.Metadata(
      'slides',
      'table-to-deck',
      collect=('deck.pptx',),
      site=_SITE,
      baseline_calls=2,
      source={'name': topic, 'generator': 'm2jax_pipelines', 'license': 'Apache-2.0'},
    ),
    overlay={'data.csv': f'Name,Value\n{rows}'.encode()},
    tests={
      'test.sh': _TEST.encode(),
      **{n: (_SHARED / n).read_bytes() for n in ('guard.py', 'contrast.py')},
      **{name: (_HERE / name).read_bytes() for name in _VERIFIER},
      'spec.json': json.dumps(spec).encode(),
    },
    solution={
      'solve.sh': _SOLVE.encode(),
      'solve.py': (_HERE / 'solve.py').read_bytes(),
      'plan.json': json.dumps({'titles': titles}).encode(),
    },
    install=tuple(f'{n}=={installed.distribution(n).version}' for n in _PACKAGES),
    verifier_s=60.0,
  )


def facts(draft: harbor.Draft) -> tuple[str, ...]:
  """The rows of a task's table."""
  return tuple(draft.overlay['data.csv'].decode().splitlines()[1:])


def _instruction(titles) -> str:
  return f"""\
Make deck.pptx from data.csv, with three slides whose title placeholders say:

1. "{titles[0]}"
2. "{titles[1]}": states the total of all values, then the name and then the value of
   the highest; no other number, no other name of data.csv, and nothing but text
3. "{titles[2]}": has one bar, column or line chart with one series: the rows of
   data.csv, in their order, both shown and in the chart's workbook, without formulas.
   It covers a fifth of the slide or more; its axes are linear, labelled, not reversed
   and go from 0 to at most three times the highest value; its titles and the name of
   its series have no number and no name of data.csv

Everything must be within its slide, nothing on top of something else, no text below 12
points (more on slides above 7.5 inches) or larger than its box, all text in a colour
that differs from the plain one behind it. Only text boxes, rectangles, pictures and
charts; no groups, connectors, tables, fields, animations or links, nothing hidden or
rotated; plain number formats, Latin letters and common fonts. The Python package
python-pptx is there; layouts, master and theme are those of its default template.
"""
