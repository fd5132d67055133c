"""Spreadsheets and finance: cells that must hold formulas, right for any inputs.

Workbooks are drawn by generators with an oracle in plain Python (`models`), or filled
with the data of a package (`tables`). The verifier recalculates the agent's workbook,
as given and with hidden changes of the inputs (`mutants`), with `formulas` and, where
it is installed, LibreOffice: both must give the oracle's values. facts/pipelines.md §5;
docs/pipelines_cowork.md. A task's source is its generator or package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import random
import re
import string
import time
from collections.abc import AsyncIterator
from pathlib import Path

from m2jax.checks import require
from m2jax.tasks import harbor
from m2jax_pipelines import installed, introduction
from m2jax_pipelines.candidate import Candidate, PipelineConfig, attempted
from m2jax_pipelines.context import Context
from m2jax_pipelines.spreadsheets import engines, models, mutants, tables
from m2jax_pipelines.spreadsheets import model as model_lib

_HERE = Path(__file__).parent
_SITE = 'spreadsheets'
_PACKAGES = (
  *('formulas', 'schedula', 'numpy', 'scipy', 'numpy-financial', 'openpyxl'),
  *('et_xmlfile', 'regex', 'python-dateutil', 'six', 'tqdm', 'click'),
)
_VERIFIER = tuple('guard.py seen.py contrast.py rewrite.py engines.py grade.py'.split())
_TEST = 'exec python3 -I -S -B "${M2JAX_TESTS:-/tests}/grade.py"\n'
_SOLVE = (
  'cd "${M2JAX_WORKSPACE:-/workspace}" && '
  'exec python3 "${M2JAX_SOLUTION:-/solution}/solve.py"\n'
)


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """Attributes:
  hidden_cases: changes of the inputs under which a workbook must remain right, unseen
    by the agent: at least this many, and more until all wrong formulas of `mutants`
    fail.
  engines: engines that must agree; empty: those on this machine. A task that names
    LibreOffice is judged only where it is installed, and takes seconds more a verdict.
  """

  kind: str = 'spreadsheets'
  dev: tuple[str, ...] = ('loan',)
  held_out: tuple[str, ...] = ('vega_datasets',)
  near_duplicate: float = 0.6  # of the rows: `facts`
  hidden_cases: int = 3
  engines: tuple[str, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    require(self, self.hidden_cases > 0, 'hidden_cases', 'above 0')
    unknown = set(self.engines) - {'formulas', 'libreoffice'}
    require(self, not unknown, 'engines', f'known: not {sorted(unknown)}')


async def candidates(config: Config, context: Context) -> AsyncIterator[Candidate]:
  """Yields workbooks of the generators in turn, without end.

  Workbooks are drawn from the seed, their hidden cases from the dataset's salt, too.
  """
  context.say('packages of the sandboxes')
  installed.site(context.directory('sites'), _SITE, _PACKAGES)
  used, salt = engines_of(config), context.salt()
  drawers = [*models.GENERATORS, *tables.drawers()]
  number = 0
  while True:
    draw = drawers[number % len(drawers)]
    own = f'{draw.__name__}/{number}'
    number += 1
    if own in context.done:
      continue
    model = draw(random.Random(f'{config.seed}/{own}'))
    context.say(model.family)
    made = _candidate(config, context, model, salt, used, own)
    yield await attempted(made, own, 'workbook', model.family, model.source)


async def _candidate(config, context, model, salt, used, own: str) -> Candidate:
  started = time.monotonic()
  rng = random.Random(f'{config.seed}/{own}/{salt}')
  try:
    draft = drafted(config, model, rng, used, own)
  except mutants.Unfit as error:
    return Candidate(own, 'workbook', model.family, model.source, reason=str(error))
  statement = await introduction.write(context.author, draft.instruction)
  draft = dataclasses.replace(draft.by(statement.by), instruction=statement.text)
  return Candidate(
    own,
    'workbook',
    model.family,
    model.source,
    draft=draft,
    text=draft.instruction,
    own=facts(model),
    wall_s=time.monotonic() - started,
    facts={'engines': list(used), 'author': statement.by},
  )


def engines_of(config: Config) -> tuple[str, ...]:
  """The engines that judge the tasks of a run on this machine."""
  return config.engines or tuple(engines.available())


def instruction(model: model_lib.Model) -> str:
  """The instruction to the agent."""
  lines = ['book.xlsx has data, and a sheet Answer to complete. Write into Answer:', '']
  for place, wanted in model.wanted.items():
    lines.append(f'- {place.partition("!")[2]}: {wanted.text}')
  lines += [
    '',
    'These cells must hold formulas that stay right when these change: '
    f'{model.changing}. Do not change what is given; further formulas may be anywhere '
    'else. Array formulas, defined names, macros, links, drawings, comments, tables, '
    'conditional formats and manual calculation are not allowed, and of functions only '
    f'{", ".join(model_lib.FUNCTIONS)}. The values of the cells must be easy to read, '
    'and their number formats plain, such as General, 0.00 or 0.0%. The Python package '
    'openpyxl is there.',
  ]
  return '\n'.join(lines) + '\n'


def facts(model: model_lib.Model) -> tuple[str, ...]:
  """The rows that are given, without headings, each with the question about them.

  A question is the set of formulas, whatever the number of rows that they go over.
  """
  question = sorted({re.sub(r'\d+', '#', w.formula) for w in model.wanted.values()})
  asked = hashlib.sha256(repr(question).encode()).hexdigest()[:16]
  rows: dict[tuple[str, str], list] = {}
  for place, value in model.cells.items():
    sheet, _, cell = place.partition('!')
    rows.setdefault((sheet, cell.lstrip(string.ascii_uppercase)), []).append(value)
  numbers = {
    (sheet, *values)
    for (sheet, _), values in rows.items()
    if not all(isinstance(value, str) for value in values)
  }
  return tuple(sorted(f'{asked}: {row}' for row in numbers))


def workbook(cells: model_lib.Cells) -> bytes:
  """The bytes of a workbook with these cells."""
  import openpyxl

  book = openpyxl.Workbook()
  book.remove(book.active)
  for place, value in cells.items():
    sheet, _, cell = place.partition('!')
    if sheet not in book.sheetnames:
      book.create_sheet(sheet)
    book[sheet][cell] = value
  file = io.BytesIO()
  book.save(file)
  return file.getvalue()


def spec(config, model: model_lib.Model, rng: random.Random, used) -> dict:
  """cases.json: what the verifier knows. Raises mutants.Unfit."""
  original: dict[str, dict] = {}
  for place, value in model.cells.items():
    sheet, _, cell = place.partition('!')
    original.setdefault(sheet, {})[cell] = value
  cases = mutants.choose(model, rng, config.hidden_cases)
  return {
    'original': original,
    'required': list(model.wanted),
    'functions': model_lib.FUNCTIONS,
    'cases': cases,
    'engines': list(used),
  }


def drafted(config, model, rng, used, own) -> harbor.Draft:
  """The task of a model. Raises mutants.Unfit."""
  plan = {place: wanted.formula for place, wanted in model.wanted.items()}
  tests = {name: (_HERE / name).read_bytes() for name in _VERIFIER}
  return harbor.Draft(
    name='spreadsheets-' + own.replace('/', '-'),
    instruction=instruction(model),
    metadata=harbor.Metadata(
      'spreadsheets',
      model.family,
      collect=('book.xlsx',),
      site=_SITE,
      baseline_calls=2,
      source=tables.provenance(model.source),
      details={'engines': list(used), 'cells': len(plan)},
    ),
    overlay={'book.xlsx': workbook(model.cells)},
    tests={
      'test.sh': _TEST.encode(),
      **tests,
      'cases.json': json.dumps(spec(config, model, rng, used)).encode(),
    },
    solution={
      'solve.sh': _SOLVE.encode(),
      'solve.py': (_HERE / 'solve.py').read_bytes(),
      'plan.json': json.dumps(plan).encode(),
    },
    install=tuple(f'{n}=={installed.distribution(n).version}' for n in _PACKAGES),
    packages=('libreoffice-calc-nogui',) if 'libreoffice' in used else (),
    verifier_s=120.0,
  )
