"""ML tasks: small machine-learning problems, scored as MLE-bench scores them.

docs/ml_tasks.md. A task has train.csv, test.csv and a sample submission. Its verifier
has the labels, and medals from a ladder of scripted solutions (`ladder`). No package
that a sandbox shows has the data: `HIDDEN` are not shown, and a search of every
readable file (`leaks`) must find no test row before any task is made. A task's source
is its problem.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import harbor
from m2jax.tasks.harbor import verifier
from m2jax_pipelines import installed
from m2jax_pipelines.candidate import Candidate, PipelineConfig, attempted
from m2jax_pipelines.context import Context
from m2jax_pipelines.llm import SCRIPTED
from m2jax_pipelines.make import LIMITS
from m2jax_pipelines.ml import grade, ladder
from m2jax_pipelines.ml.problems import PROBLEMS, Data

_HERE = Path(__file__).parent
SITE = 'ml'
_PACKAGES = (
  *('numpy', 'scipy', 'scikit-learn', 'joblib', 'threadpoolctl', 'narwhals'),
  'pillow',
)
# Packages that have the data of a problem, and that sandboxes do not show.
HIDDEN = (
  *('sklearn.datasets.data', 'sklearn.datasets.images', 'sklearn.datasets.tests'),
  *('statsmodels', 'skimage', 'vega_datasets', 'django', 'seaborn', 'pandas.tests'),
)
_SEARCH = dataclasses.replace(
  LIMITS, cpu_s=7200, wall_s=3600.0, memory_bytes=3 << 30, output_bytes=4 << 20
)
_TEST = 'exec python3 -I -S -B "${M2JAX_TESTS:-/tests}/grade.py"\n'
_SOLVE = (
  'cd "${M2JAX_WORKSPACE:-/workspace}" && '
  'exec python3 "${M2JAX_SOLUTION:-/solution}/solve.py"\n'
)
_METRICS = {
  'accuracy': 'the share of right labels',
  'macro_f1': 'the mean of the F1 scores of the classes',
  'ari': 'the adjusted Rand index',
  'auc': 'the area under the ROC curve',
  'spearman': "Spearman's rank correlation",
  'rmse': 'the root mean squared error',
  'rmsle': 'the root mean squared error of log(1 + target)',
  'mae': 'the mean absolute error',
}


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """Attributes:
  problems: names; all of `problems.PROBLEMS` if empty.
  time_limit_s: elapsed time of an attempt.
  search: directories that the leak search walks, besides the task's files; ('/',) is
    all that an agent can read, and takes minutes.
  """

  kind: str = 'ml'
  count: int = len(PROBLEMS)
  dev: tuple[str, ...] = ('weather',)
  held_out: tuple[str, ...] = ('carbon', 'digits', 'party')
  problems: tuple[str, ...] = ()
  time_limit_s: float = 1800.0
  search: tuple[str, ...] = ('/',)

  def __post_init__(self):
    super().__post_init__()
    unknown = set(self.problems) - set(PROBLEMS)
    require(self, not unknown, 'problems', f'of {sorted(PROBLEMS)}: {sorted(unknown)}')
    require(self, self.time_limit_s > 0, 'time_limit_s', 'above 0')
    hides = self.backend != 'rlimit_only'
    require(self, hides, 'backend', 'one that hides files: rlimit_only does not')


class Leak(RuntimeError):
  """A file that an agent can read has test rows; names it."""


def unavailable() -> str:
  """Why the pipeline cannot run here, or ''."""
  names = {*_PACKAGES, *(problem.package for problem in PROBLEMS.values())}
  try:
    for name in sorted(names):
      installed.distribution(name)
  except installed.SourceMissing as error:
    return f'{str(error).partition(";")[0]}: pip install -e "./m2jax_pipelines[ml]"'
  return ''


async def candidates(config: Config, context: Context) -> AsyncIterator[Candidate]:
  """Yields the leak search, and then a task of each problem.

  Raises:
    installed.SourceMissing: a package is missing.
    sandbox.SandboxError: the leak search found something; names the file.
  """
  if reason := unavailable():
    raise installed.SourceMissing(reason)
  installed.site(context.directory('sites'), SITE, _PACKAGES)
  names = [n for n in config.problems or PROBLEMS if f'{n}/0' not in context.done]
  made = {name: drawn(config, name, context.salt()) for name in names}
  if not made:
    return
  context.say('leak search')
  about = '+'.join(names), 'leak search', 'leak search', 'leak search'
  found = await attempted(_searched(config, context, made), *about)
  yield found
  if found.reason:
    raise sandbox.SandboxError(found.reason)
  for name, data in made.items():
    context.say(name)
    own, family = f'{name}/0', PROBLEMS[name].family
    work = _candidate(config, context, name, data)
    yield await attempted(work, own, 'ladder', family, name)


def drawn(config: Config, name: str, salt: str) -> Data:
  """The data of a problem; the split depends on the dataset's salt."""
  digest = hashlib.sha256(f'{config.seed}/{name}/{salt}'.encode()).digest()
  problem = PROBLEMS[name]
  return problem.draw(
    np.random.default_rng(int.from_bytes(digest[:8], 'big')), problem.paths()
  )


def box(config: PipelineConfig, dataset: Path, contents, limits=LIMITS):
  """A coroutine: a sandbox with what an agent of these tasks sees."""
  return sandbox.create(
    contents=contents,
    backend=config.backend,
    limits=limits,
    env={'PYTHONPATH': f'/sites/{SITE}'},
    host=verifier.host(dataset, hide=HIDDEN),
  )


def needles(name: str, data: Data) -> list[tuple[str, list[float] | str]]:
  """What the leak search looks for: rows of a public copy, test rows, labels."""
  found = [
    ('a public copy', value if isinstance(value, str) else value[:24])
    for value in data.public[:: max(1, len(data.public) // 4)]
  ]
  for row in data.test[:3]:
    values = [value for key, value in row.items() if key != 'id']
    found.append(('a test row', values[0] if isinstance(values[0], str) else values))
  labels = list(data.truth[:100])
  text = isinstance(labels[0], str)
  found.append(('labels in order', ' '.join(labels) if text else labels))
  pairs = zip(data.test[:4], data.truth[:4], strict=True)
  found.append(('ids with labels', ' '.join(f'{row["id"]} {v}' for row, v in pairs)))
  # Short rows of whole numbers occur by chance.
  long = [n for n in found if isinstance(n[1], str) or len(set(n[1])) > 3]
  return [(f'{name}: {what}', v) for what, v in (long if not text else found)]


async def search(
  config: Config, dataset: Path, made: Mapping[str, Data], planted=()
) -> dict:
  """The result of the leak search in the sandbox of an agent (`leaks`).

  Args:
    config: the directories to walk.
    dataset: the dataset, whose `sites/` the sandbox shows.
    made: the data to look for; the files of their tasks are there.
    planted: further files of the workspace, path → content.
  """
  given = {
    f'{name}/{file}': content
    for name, data in made.items()
    for file, content in ladder.files(PROBLEMS[name], data).items()
  }
  tests = [f'/workspace/{path}' for path in given if path.endswith('/test.csv')]
  wanted = [needle for name, data in made.items() for needle in needles(name, data)]
  contents = {
    **given,
    **dict(planted),
    'leaks.py': (_HERE / 'leaks.py').read_bytes(),
    'needles.json': json.dumps({'needles': wanted, 'allowed': tests}).encode(),
  }
  async with await box(config, dataset, contents, _SEARCH) as agent:
    roots = ' '.join(dict.fromkeys(('/workspace', *config.search)))
    done = await agent.exec(f'exec python3 leaks.py needles.json {roots}')
  if done.returncode:
    raise sandbox.SandboxError(f'leak search: {done.returncode}: {done.stderr[-400:]}')
  return json.loads(done.stdout)


async def _searched(config, context, made) -> Candidate:
  started = time.monotonic()
  found = await search(config, context.dataset, made)
  names = [f'{what} in {path}' for what, path in found['hits']]
  return Candidate(
    '+'.join(made),
    'leak search',
    'leak search',
    'leak search',
    passed=not names,
    invalid=bool(names),
    reason=f'an agent can read test rows: {"; ".join(names[:5])}' if names else '',
    wall_s=time.monotonic() - started,
    facts={**found, 'hits': names, 'unopened': found['unopened'][:100]},
  )


async def _candidate(config, context, name: str, data: Data) -> Candidate:
  started, own, problem = time.monotonic(), f'{name}/0', PROBLEMS[name]
  about = dict(id=own, stage='ladder', family=problem.family, source=name)
  files = ladder.files(problem, data)
  async with await box(config, context.dataset, files) as agent:
    try:
      found = await ladder.climb(problem, data, agent)
    except ladder.BrokenRung as error:
      return Candidate(**about, reason=str(error))
  draft = drafted(config, name, data, found)
  return Candidate(
    **about,
    draft=draft,
    text=draft.instruction,
    own=(name,),
    wall_s=time.monotonic() - started,
    facts={'ladder': dict(found.scores), 'author': SCRIPTED},
  )


def drafted(config: Config, name: str, data: Data, found: ladder.Ladder):
  """The task of a problem."""
  problem = PROBLEMS[name]
  files, program = ladder.files(problem, data), ladder.script
  digests = [installed.digest(path) for path in problem.paths()]
  wheel = installed.distribution(problem.package)
  source = installed.Source(
    problem.package,
    wheel.version,
    hashlib.sha256(''.join(digests).encode()).hexdigest(),
    installed.license_of(wheel),
  )
  return harbor.Draft(
    name=f'ml-{name}',
    instruction=instruction(config, name, data),
    metadata=harbor.Metadata(
      'ml',
      problem.family,
      collect=(ladder.SUBMISSION,),
      site=SITE,
      hide=HIDDEN,
      max_tool_calls=60,
      wall_s=config.time_limit_s,
      baseline_calls=2,
      source=source.facts(),
      details={
        'author': SCRIPTED,
        'ladder': dict(found.scores),
        'best': found.best,
        'rows': [len(data.train), len(data.test)],
        **found.spec,
      },
    ),
    overlay=files,
    tests={
      'test.sh': _TEST.encode(),
      'grade.py': (_HERE / 'grade.py').read_bytes(),
      'spec.json': json.dumps(dict(found.spec)).encode(),
      'truth.json': json.dumps(ladder.truth(data)).encode(),
    },
    solution={
      'solve.sh': _SOLVE.encode(),
      'solve.py': program(problem.ladder[found.best]).encode(),
    },
    install=tuple(f'{n}=={installed.distribution(n).version}' for n in _PACKAGES),
    agent_s=config.time_limit_s,
    verifier_s=60.0,
  )


def instruction(config: Config, name: str, data: Data) -> str:
  """The statement."""
  problem = PROBLEMS[name]
  columns = ', '.join(column for column in data.test[0] if column != 'id')
  if len(data.test[0]) > 8:
    columns = f'x0 to x{len(data.test[0]) - 2}'
  train = f'- train.csv: {len(data.train)} rows; {columns}'
  if data.train and 'target' in data.train[0]:
    train += '; target'
  better = 'higher' if grade.METRICS[problem.metric][1] else 'lower'
  return f"""\
{problem.about}

{train if data.train else 'There is no training data.'}
- test.csv: {len(data.test)} rows; id; {columns}
- sample_submission.csv: the format of a submission

Predict `target` for test.csv. Write submission.csv: the line `id,target`, and then one
line for each id of test.csv, in any order. Its score is {_METRICS[problem.metric]};
{better} is better. The score is compared with those of other solutions: among the best
40, 20 and 10 % it gets a bronze, silver or gold medal. A file with missing, unknown or
repeated ids or with values that are not {
    'numbers' if grade.METRICS[problem.metric][2] else 'labels'
  } counts as none.

You have {config.time_limit_s / 60:g} minutes. Python 3 with numpy, scipy, scikit-learn
and Pillow is there; there is no network.
"""
