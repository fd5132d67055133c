"""A claim, how its arms are tuned and measured, and its table, plot and verdicts."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import pathlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from benchmarks import harness
from benchmarks.claims import rows, tasks, training, verdicts
from benchmarks.claims.training import Sizes, Trainer
from m2jax.observe import page, svg

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(rows.__path__)))
SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (100, 101)
HOURS = 2.0
SETUPS = pathlib.Path(__file__).parent / 'setups'

# (trainer, condition, arm, learning rate, seed) → a JSON object with the metrics
Measure = Callable[[Trainer, str, str, float, int], dict[str, Any]]


class SetupError(ValueError):
  """The set-up of a claim is missing, is another one, or is not committed."""


@dataclasses.dataclass(frozen=True)
class Claim:
  """A row: arms under conditions, and which of them the claim is about.

  Attributes:
    name: module of `rows`.
    question: the claim, one sentence.
    conditions, arms: names; every arm is measured under every condition.
    subject: the arm that is compared with all others.
    measure: makes one run.
    bounds: arms that are no rivals: upper bounds, or controls.
    sizes: the size of every run.
    rates: learning rates that every arm is tuned over.
    metrics: what is compared, {key of a run: its name}; the first one is tuned by.
    columns: more numbers of a run for the table, {key: its name}.
    finish: adds to all runs of a row what depends on several of them.
    x_label: the x axis of the learning curves; `curve` of a run is [[x, success], …].
    at_scale: where to repeat it at scale.
  """

  name: str
  question: str
  conditions: tuple[str, ...]
  arms: tuple[str, ...]
  subject: str
  measure: Measure
  at_scale: str
  bounds: tuple[str, ...] = ()
  sizes: Sizes = Sizes()
  rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
  metrics: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {'end': 'success at the end', 'mean': 'over all updates'}
  )
  columns: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {'lowest': 'lowest', 'clipped': 'clipped', 'lag': 'lag'}
  )
  finish: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list
  x_label: str = 'update'

  @property
  def cells(self) -> list[tuple[str, str]]:
    return [*itertools.product(self.conditions, self.arms)]

  @property
  def code(self) -> str:
    """A digest of the code that the runs depend on, beside the library's."""
    files = [sys.modules[self.measure.__module__].__file__, tasks.__file__]
    files.append(training.__file__)
    text = b''.join(pathlib.Path(str(file)).read_bytes() for file in files)
    return hashlib.sha256(text).hexdigest()[:16]

  @property
  def settings(self) -> dict[str, Any]:
    """What a set-up fixes besides the rates that were chosen, as JSON values."""
    return {
      'code': self.code,
      'sizes': dataclasses.asdict(self.sizes),
      'arms': list(self.arms),
      'conditions': list(self.conditions),
      'subject': self.subject,
      'bounds': list(self.bounds),
      'rates': list(self.rates),
      'seeds': list(SEEDS),
      'tuning_seeds': list(TUNING_SEEDS),
      'metrics': list(self.metrics),
    }


def load(name: str) -> Claim:
  """The claim of a module of `rows`."""
  return importlib.import_module(f'{rows.__name__}.{name}').CLAIM


class Row:
  """The measurements of a claim, in a file."""

  def __init__(self, claim: Claim, workdir: pathlib.Path, hours: float = HOURS):
    workdir.mkdir(parents=True, exist_ok=True)
    self.claim, self._hours = claim, hours
    self._kept = harness.Results(workdir / f'{claim.name}.jsonl')
    self._trainer, self._spent_s = None, 0.0

  def tune(self) -> dict[str, Any]:
    """The set-up: each cell's rate of the highest mean score on the tuning seeds.

    Raises:
      SetupError: the time limit ended it before all trials.
    """
    chosen: dict[str, dict[str, float]] = {}
    trials = itertools.product(self.claim.cells, self.claim.rates, TUNING_SEEDS)
    found = [self._once(*cell, rate, seed) for cell, rate, seed in trials]
    if None in found:
      raise SetupError(
        f'{self.claim.name}: {found.count(None)} trials of tuning are left at the time '
        f'limit of {self._hours:g} h: smaller sizes, or --hours'
      )
    metric = next(iter(self.claim.metrics))
    for condition, arm in self.claim.cells:
      mean = {
        rate: np.mean([r[metric] for r in found if _is(r, condition, arm, rate)])
        for rate in self.claim.rates
      }
      chosen.setdefault(condition, {})[arm] = max(mean, key=mean.get)
    return {'settings': self.claim.settings, 'chosen': chosen}

  def measure(
    self, setup: Mapping[str, Any], seeds: Sequence[int] = SEEDS
  ) -> list[dict[str, Any]]:
    """The runs of the seeds, seed by seed, until the time limit."""
    # Tuning takes part of the row's time.
    for cell, rate, seed in itertools.product(
      self.claim.cells, self.claim.rates, TUNING_SEEDS
    ):
      self._spent_s += self._kept_s(*cell, rate, seed)
    found = []
    for seed, (condition, arm) in itertools.product(seeds, self.claim.cells):
      found.append(self._once(condition, arm, setup['chosen'][condition][arm], seed))
    return self.claim.finish([run for run in found if run])

  def _key(self, *run: Any) -> list[Any]:
    return [*run, dataclasses.asdict(self.claim.sizes), self.claim.code]

  def _kept_s(self, *run: Any) -> float:
    key = self._key(*run)
    return self._kept.once(key, dict)['wall_s'] if key in self._kept else 0.0

  def _once(self, condition: str, arm: str, rate: float, seed: int) -> dict | None:
    """A run, from the file or made now; None if the time is spent."""
    run = condition, arm, rate, seed
    if self._key(*run) not in self._kept and self._spent_s > 3600 * self._hours:
      return None
    self._trainer = self._trainer or Trainer(self.claim.sizes)
    measure = lambda: (
      self.claim.measure(self._trainer, *run)
      | dict(condition=condition, arm=arm, rate=rate, seed=seed)
    )
    found = self._kept.once(self._key(*run), measure)
    self._spent_s += found['wall_s']
    print(
      f'{condition}, {arm}, rate {rate:g}, seed {seed}: {found["end"]:.2f} '
      f'({found["wall_s"]:.0f} s)',
      file=sys.stderr,
    )
    return found


def _is(run: Mapping, condition: str, arm: str, rate: float) -> bool:
  return (run['condition'], run['arm'], run['rate']) == (condition, arm, rate)


def save_setup(claim: Claim, setup: Mapping[str, Any], folder=SETUPS) -> pathlib.Path:
  folder.mkdir(exist_ok=True)
  path = folder / f'{claim.name}.json'
  path.write_text(json.dumps(setup, indent=1) + '\n')
  return path


def committed_setup(claim: Claim, folder: pathlib.Path = SETUPS) -> dict[str, Any]:
  """The set-up that the seeds are measured with.

  Raises:
    SetupError: it is missing, has other settings than the code, or is not committed.
  """
  path = folder / f'{claim.name}.json'
  if not path.exists():
    raise SetupError(f'{path} is missing: run --tune, then commit it')
  setup = json.loads(path.read_text())
  if setup['settings'] != json.loads(json.dumps(claim.settings)):
    raise SetupError(f'{path} has other settings than the claim: --tune again')
  # The code of the claims is part of the set-up; other rows' files may change.
  watched = [str(path), *map(str, path.parents[1].rglob('*.py'))]
  try:
    git = lambda *args: subprocess.run(
      ['git', '-C', str(folder), *args], check=True, capture_output=True, text=True
    )
    git('ls-files', '--error-unmatch', str(path))
    git('diff', '--quiet', 'HEAD', '--', *watched)
    commit = git('log', '-1', '--format=%h', '--', str(path)).stdout.strip()
  except (subprocess.CalledProcessError, OSError) as error:
    raise SetupError(
      f'{path}, or the code of the claims, is not committed: the set-up is fixed by a '
      'commit before the seeds are measured'
    ) from error
  return setup | {'commit': commit}


def trial(claim: Claim, updates: int) -> tuple[Claim, dict[str, Any]]:
  """The claim in tiny runs with its middle rate, to see that it works: no evidence."""
  sizes = dataclasses.replace(claim.sizes, updates=updates, evaluated=64)
  rate = claim.rates[len(claim.rates) // 2]
  chosen = {c: dict.fromkeys(claim.arms, rate) for c in claim.conditions}
  claim = dataclasses.replace(claim, sizes=sizes, question=f'TRIAL: {claim.question}')
  return claim, {'settings': claim.settings, 'chosen': chosen}


def report(
  claim: Claim, runs: Sequence[Mapping[str, Any]], commit: str = 'none: a trial'
) -> str:
  """The question, the table and the verdicts, as Markdown."""
  head = ['condition', 'arm', 'seeds', 'rate', 'start', *claim.metrics.values()]
  head += [*claim.columns.values(), 'episodes', 'CPU s']
  keys = ['start', *claim.metrics, *claim.columns]
  lines = []
  for condition, arm in claim.cells:
    found = [r for r in runs if (r['condition'], r['arm']) == (condition, arm)]
    if not found:
      continue
    line = [condition, arm, str(len(found)), f'{found[0]["rate"]:g}']
    line += [harness.spread([r[key] for r in found], 2) for key in keys]
    line += [
      harness.spread([r[key] for r in found], 0) for key in ('episodes', 'cpu_s')
    ]
    lines.append(line)
  cpu_min = sum(r['cpu_s'] for r in runs) / 60
  varied = lambda i: len(lines) < 2 or len({row[i] for row in lines}) > 1
  shown = [i for i in range(len(head)) if i < 2 or varied(i)]
  same = [f'{head[i]} {lines[0][i]}' for i in range(len(head)) if i not in shown]
  pick = lambda cells: [cells[i] for i in shown]
  return '\n\n'.join(
    [
      claim.question,
      harness.markdown(pick(head), [*map(pick, lines)]),
      *([f'In every line: {", ".join(same)}.'] if same else []),
      *verdict_lines(claim, runs),
      f'CPU time of the measured runs: {cpu_min:.0f} minutes. Set-up: commit {commit}.',
      f'At scale: {claim.at_scale}',
    ]
  )


def verdict_lines(claim: Claim, runs: Sequence[Mapping[str, Any]]) -> list[str]:
  """One sentence for each condition and metric."""
  out = []
  for metric, name in claim.metrics.items():
    for condition, arms in verdicts.scores(runs, metric).items():
      others = arms.keys() - {claim.subject, *claim.bounds}
      rivals = {arm: arms[arm] for arm in claim.arms if arm in others}
      found = verdicts.strongest(arms.get(claim.subject, {}), rivals)
      if found:
        text = verdicts.sentence(claim.subject, found)
        out.append(f'- {condition}, {name}: {text}')
  return ['\n'.join(out)] if out else ['No verdict: no seed is complete.']


def plot(claim: Claim, runs: Sequence[Mapping[str, Any]]) -> str:
  """Learning curves, the mean over seeds, one panel for each condition: an SVG file."""
  panels = []
  for condition in claim.conditions:
    series = []
    for colour, arm in enumerate(claim.arms):
      found = [r for r in runs if (r['condition'], r['arm']) == (condition, arm)]
      if found:
        x, y = _mean_curve([r['curve'] for r in found])
        series.append(svg.Series(arm, x, y, colour % 6))
    if drawn := svg.line_plot(
      series, label=condition, x_label=claim.x_label, y_limits=(0.0, 1.0)
    ):
      panels.append((condition, drawn))
  return _page(panels, claim.arms)


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> tuple[list, list]:
  """The mean of curves, up to the end of the shortest."""
  end = min(curve[-1][0] for curve in curves)
  x = sorted({point[0] for curve in curves for point in curve if point[0] <= end})
  y = [np.interp(x, *np.array(curve, float).T) for curve in curves]
  return [*map(float, x)], np.mean(y, axis=0).tolist()


_TITLE, _LINE = 18, 14


def _page(panels: Sequence[tuple[str, Markup]], names: Sequence[str]) -> str:
  """Panels below each other with a common legend, and the report's style sheet."""
  step = svg.HEIGHT + _TITLE
  height = step * len(panels) + _LINE * len(names) + 10
  parts = []
  for i, (title, drawn) in enumerate(panels):
    place = f'y="{i * step + _TITLE}" width="{svg.WIDTH}" height="{svg.HEIGHT}" '
    parts.append(Markup('<text x="46" y="{}">{}</text>').format(i * step + 14, title))
    parts.append(Markup(str(drawn).replace('<svg ', f'<svg {place}', 1)))
  for i, name in enumerate(names):
    y = step * len(panels) + _LINE * i + 10
    parts.append(
      Markup(
        '<g class="line s{c}"><polyline points="46,{y} 66,{y}"/></g>'
        '<text x="72" y="{t}">{name}</text>'
      ).format(c=i % 6, y=y - 4, t=y, name=name)
    )
  style = page.asset('report.css').replace(']]>', '')
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH} {height}" '
    f'font-family="sans-serif" font-size="11"><style><![CDATA[{style}]]></style>'
    f'{Markup("").join(parts)}</svg>\n'
  )
