"""The report of a run: one self-contained HTML page.

Success with Wilson intervals, learning curves, off-policy and window plots, throughput,
configuration, and trajectories. It loads nothing: style, script and plots are inline,
and the page's content security policy allows nothing else. Trajectories are untrusted
output: all text passes `printable`, and the template escapes it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from m2jax.observe import findings as findings_lib
from m2jax.observe import names, page, plots, stats, svg, transcript
from m2jax.observe.evaluations import Evaluation, Pair
from m2jax.observe.printable import clip, one_line, printable

_STEP_LIMIT_CHARS = 6000
SERVICES = ('pool', 'engine', 'gateway')  # services whose counters are listed


@dataclasses.dataclass(frozen=True)
class Summary:
  """The head of the report.

  Attributes:
    title: the page's title.
    evaluations: rows of the headline table, in order.
    facts: short name → value, such as wall-clock time or parameters.
    capacity_items, window_items: N and W of windowed FIFO; if given, the plots show the
      bounds N + W − 2 on age and W − 1 on out-of-order distance (DESIGN §6).
  """

  title: str
  evaluations: Sequence[Evaluation] = ()
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  capacity_items: int | None = None
  window_items: int | None = None


@dataclasses.dataclass(frozen=True)
class Turn:
  """Training data of one assistant message; None, () or '' if unknown.

  Attributes:
    advantage: advantage of its response tokens.
    versions: policy versions that sampled it.
    response_tokens: number of sampled tokens.
    status: the parser's verdict.
  """

  advantage: float | None = None
  versions: Sequence[int] = ()
  response_tokens: int | None = None
  status: str = ''


@dataclasses.dataclass(frozen=True)
class Episode:
  """One trajectory to show.

  Attributes:
    phase, step: when it was sampled: 'rl' and the update, or an evaluation's stage.
    family, task: the task's family and spec.
    success: the verifier's verdict in [0, 1]. reward: the sum over the turns.
    messages: the chat as OpenAI dicts. turns: one per assistant message.
    end_reason: how it ended. error: the cause of an infrastructure failure.
    wall_s: wall-clock seconds.
  """

  phase: str
  step: int
  family: str
  task: str
  success: float
  messages: Sequence[Mapping[str, Any]]
  turns: Sequence[Turn] = ()
  reward: float | None = None
  end_reason: str = ''
  error: str = ''
  wall_s: float = 0.0


def write_report(
  path: str | os.PathLike,
  records: Sequence[Mapping[str, Any]],
  trajectories: Sequence[Episode],
  summary: Summary,
  config: Mapping[str, Any],
  findings: Sequence[findings_lib.Shown] = (),
) -> None:
  """Writes the page; replaces an old one only when the new one is complete.

  Args:
    path: the HTML file's path.
    records: `metrics.read(workdir)`.
    trajectories: episodes; all of them are on the page.
    summary: the head of the page.
    config: the run's settings, a nested mapping.
    findings: what the run doctor found.

  Raises:
    OSError: the file cannot be written.
  """
  path = pathlib.Path(path)
  text = render(records, trajectories, summary, config, findings)
  temporary = path.with_name(path.name + '.new')
  temporary.write_text(text, encoding='utf-8')
  os.replace(temporary, path)


def render(
  records: Sequence[Mapping[str, Any]],
  trajectories: Sequence[Episode],
  summary: Summary,
  config: Mapping[str, Any],
  findings: Sequence[findings_lib.Shown] = (),
) -> str:
  """The page of `write_report` as text."""
  script = page.asset('report.js')
  shown = [_episode(episode) for episode in trajectories]
  return page.render(
    'report.html',
    summary=summary,
    headline=_headline(summary.evaluations),
    tables=_tables(summary.evaluations),
    findings=[(found, plots.of_finding(found, records)) for found in findings],
    sections=plots.sections(records, summary.capacity_items, summary.window_items),
    trajectories=plots.TRAJECTORIES,
    counters=_counters(records),
    config=_flatten(config),
    episodes=shown,
    choices={
      name: sorted({str(episode[name]) for episode in shown})
      for name in ('phase', 'family', 'verdict')
    },
    script=Markup(script),
    script_hash=page.csp_hash(script),
  )


def _rate(pair: Pair | None) -> dict[str, Any] | None:
  """A pair as the table shows it; None if it was not measured."""
  if pair is None or not pair[1]:
    return None
  successes, n = pair
  low, high = stats.wilson(successes, n)
  return {
    'rate': successes / n,
    'text': _percent(successes / n),
    'low': _percent(low),
    'high': _percent(high),
    'count': f'{_exact(successes)} / {n:,}',
    'bar': svg.interval(successes / n, low, high),
  }


def _percent(share: float) -> str:
  return f'{100 * share:.1f} %'


def _exact(value: Any) -> str:
  """Integers with all their digits, other numbers in few."""
  if not isinstance(value, (int, float)):
    return str(value)
  return f'{int(value):,}' if value == value // 1 else svg.number(value)


def _headline(rows: Sequence[Evaluation]) -> list[dict[str, Any]]:
  stages = [row.stage for row in rows]
  result = stages.index('after RL') if 'after RL' in stages else len(rows) - 1
  return [
    {
      'stage': row.stage,
      'sampled': _rate(row.sampled),
      'greedy': _rate(row.greedy),
      'is_result': index == result,
    }
    for index, row in enumerate(rows)
  ]


def _tables(rows: Sequence[Evaluation]) -> list[tuple[str, str, dict[str, Any]]]:
  """Title, first column and contents of the tables below the headline."""
  found = (
    ('By chain length', 'tool calls', _parts(rows, 'lengths')),
    ('By family', 'family', _parts(rows, 'families')),
  )
  return [table for table in found if table[2]]


def _parts(rows: Sequence[Evaluation], field: str) -> dict[str, Any] | None:
  """A column per stage, and the change by RL (or else by the last stage)."""
  parts = [getattr(row, field) for row in rows]
  keys = sorted({key for part in parts for key in part})
  if not keys:
    return None
  stages = [row for row in rows if getattr(row, field)]
  stage_names = [row.stage for row in stages]
  ends = ('after SFT', 'after RL')
  pair = tuple(stage_names.index(e) if e in stage_names else None for e in ends)
  if None in pair:
    pair = (len(stages) - 2, len(stages) - 1) if len(stages) > 1 else None
  table = []
  for key in keys:
    cells = [_rate(getattr(row, field).get(key)) for row in stages]
    table.append({'name': key, 'cells': cells, 'move': _move(cells, pair)})
  return {
    'stages': stage_names,
    'pair': pair and tuple(stage_names[i] for i in pair),
    'rows': table,
  }


def _move(
  cells: Sequence[dict[str, Any] | None], pair: tuple[int, int] | None
) -> dict[str, Any] | None:
  """The change between two cells of a row; None if one is missing."""
  if pair is None or not (cells[pair[0]] and cells[pair[1]]):
    return None
  before, after = cells[pair[0]]['rate'], cells[pair[1]]['rate']
  return {
    'text': f'{100 * (after - before):+.1f}',
    'bar': svg.change(before, after),
    'sign': 'good' if after >= before else 'bad',
  }


def _counters(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
  """Last values of the counters, by service."""
  groups: dict[str, list[tuple[str, str]]] = {}
  for service in SERVICES:
    for key in names.group(service, 'report'):
      last = next((r[key] for r in reversed(records) if key in r), None)
      if last is not None:
        pair = key.partition('/')[2].replace('_', ' '), _exact(last)
        groups.setdefault(service, []).append(pair)
  return groups


def _flatten(config: Any, prefix: str = '') -> list[tuple[str, str]]:
  """Dotted name and value of every setting."""
  if isinstance(config, Mapping) and (config or not prefix):
    return [
      pair
      for key, value in config.items()
      for pair in _flatten(value, f'{prefix}.{key}' if prefix else str(key))
    ]
  return [(prefix, str(config))]


def _episode(episode: Episode) -> dict[str, Any]:
  task = next(
    (s.text for s in transcript.steps(episode.messages) if s.kind == 'task'), ''
  )
  facts = [episode.end_reason, episode.error, f'{episode.wall_s:.1f} s']
  turns = max(1, len(episode.turns))
  return {
    'phase': printable(episode.phase),
    'step': episode.step,
    'family': printable(episode.family),
    'verdict': _verdict(episode),
    'task': episode.task,
    'question': one_line(task or episode.task, 160),
    'reward': None if episode.reward is None else f'{episode.reward:+.3g}',
    'facts': ' · '.join(fact for fact in facts if fact),
    'turns': turns,
    'steps': _steps(episode),
  }


def _verdict(episode: Episode) -> str:
  if episode.end_reason == 'infrastructure':
    return 'not judged'
  return 'solved' if episode.success >= 1 else 'failed'


def _steps(episode: Episode) -> list[dict[str, Any]]:
  shown = []
  last_turn = -1
  for step in transcript.steps(episode.messages):
    assistant = step.kind in ('thinking', 'text', 'call', 'answer')
    turn = None
    if assistant and step.turn != last_turn and step.turn < len(episode.turns):
      turn, last_turn = _turn(step.turn, episode.turns[step.turn]), step.turn
    shown.append(
      {
        'kind': step.kind,
        'tool': step.tool,
        'text': clip(step.text, _STEP_LIMIT_CHARS),
        'turn': turn,
      }
    )
  return shown


def _turn(index: int, turn: Turn) -> dict[str, Any]:
  words = [f'turn {index + 1}']
  if turn.versions:
    low, high = min(turn.versions), max(turn.versions)
    words.append(f'policy {low}' if low == high else f'policy {low}–{high}')
  if turn.response_tokens is not None:
    words.append(f'{turn.response_tokens} tokens')
  if turn.status:
    words.append(turn.status)
  advantage = round(turn.advantage or 0.0, 3) + 0.0  # no −0.000
  return {
    'words': ' · '.join(words),
    'advantage': None if turn.advantage is None else f'{advantage:+.3f}',
    'sign': 'good' if advantage > 0 else 'bad' if advantage < 0 else 'none',
  }
