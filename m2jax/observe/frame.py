"""The state of the terminal view, and how it is drawn as lines of text.

Separate from `terminal.py` so that it can be drawn without a terminal. Lines are
truncated, never wrapped, and laid out by hand: a rich table costs several times as
much, and the run needs the processor.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from m2jax.observe import findings, metrics, names, stats, transcript
from m2jax.observe.printable import one_line

_BARS = '▁▂▃▄▅▆▇█'
_HISTORY = 240  # values in a sparkline
_SNIPPET_LINES = 6
_FINDING_LINES = 3
_AVERAGE_STEPS = 10
_AVERAGED = tuple(map(names.checked, ('success', 'reward', 'loss')))
_SERVICES = ('engine', 'gateway')
# State of an item → (sign, style) inside the window and beyond it.
_INSIDE = {
  'pending': ('□', 'yellow'),
  'completed': ('■', 'green'),
  'taken': ('·', 'dim'),
  'failed': ('×', 'red'),
}
_STEP_STYLE = {
  'task': ('task', ''),
  'thinking': ('think', 'italic dim'),
  'text': ('text', ''),
  'call': ('$', 'yellow'),
  'observation': ('→', 'blue'),
  'answer': ('answer', 'bold'),
}
_BEYOND = {**_INSIDE, 'pending': ('░', 'dim'), 'completed': ('▒', 'magenta')}


@dataclasses.dataclass
class Phase:
  """One phase of the run; times are from the monotonic clock.

  Attributes:
    expected_s: its share of the run, in seconds of a machine like ours.
    progress: completed fraction; None is unknown.
    first: time and progress when this was first known, which a speed is taken from: a
      phase may begin with compilation, or where an earlier run stopped.
  """

  name: str
  expected_s: float
  started_s: float | None = None
  ended_s: float | None = None
  progress: float | None = None
  first: tuple[float, float] | None = None
  note: str = ''

  def elapsed_s(self) -> float:
    """Seconds spent in the phase so far."""
    if self.started_s is None:
      return 0.0
    return (self.ended_s or time.monotonic()) - self.started_s

  def set_progress(self, fraction: float) -> None:
    """Sets the completed fraction, which never falls."""
    fraction = min(1.0, max(0.0, fraction, self.progress or 0.0))
    if self.first is None:
      self.first = time.monotonic(), fraction
    self.progress = fraction

  def whole_s(self) -> float | None:
    """Estimated seconds of all of it, from its progress; None without any yet."""
    if self.first is None or self.progress <= self.first[1]:
      return None
    then_s, before = self.first
    return (time.monotonic() - then_s) / (self.progress - before)


@dataclasses.dataclass
class State:
  """Everything that the view shows. The owner holds a lock around every call."""

  title: str
  phases: list[Phase]
  started_s: float
  latest: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  history: dict[str, collections.deque] = dataclasses.field(default_factory=dict)
  current: Phase | None = None
  doing: str = ''  # within the phase: 'compiling the engine 3 of 9'
  learning: str = ''  # phase of the latest records with a loss: 'sft' or 'rl'
  window: tuple[tuple[str, ...], int, int | None] | None = None
  snippet: Sequence[Mapping[str, Any]] = ()
  findings: tuple[findings.Shown, ...] = ()  # of the run doctor, errors first

  def find(self, name: str) -> Phase:
    """Returns the phase of that name.

    Raises:
      ValueError: there is none.
    """
    for phase in self.phases:
      if phase.name == name:
        return phase
    names = ', '.join(phase.name for phase in self.phases)
    raise ValueError(f'RunView: no phase {name!r}; the phases are {names}')

  def begin(self, name: str) -> None:
    """Starts a phase, or restarts it; phases skipped on the way count as done."""
    self.current = self.find(name)
    for phase in self.phases[: self.phases.index(self.current)]:
      if phase.started_s is None:
        phase.ended_s = time.monotonic()
    self.current.started_s = time.monotonic()
    self.current.ended_s = self.current.first = None
    self.doing = ''

  def end_current(self, note: str = '') -> Phase | None:
    """Ends the running phase and returns it; None if none is running."""
    ended, self.current, self.doing = self.current, None, ''
    if ended is not None:
      ended.ended_s, ended.note = time.monotonic(), note
    return ended

  def set_progress(self, fraction: float) -> None:
    """Sets the completed fraction of the running phase, if there is one."""
    if self.current is not None:
      self.current.set_progress(fraction)

  def add(self, record: Mapping[str, Any]) -> None:
    """Adds a metric record to the latest values and to the history for averages."""
    phase = str(record.get('phase', ''))
    if phase == 'eval':
      # Shows the overall, sampled result only; the report has the families.
      if record.get('family', 'all') != 'all' or record.get('temperature') == 0:
        return
    elif phase != self.learning and 'loss' in record:
      self.learning = phase
      self.history.clear()
    self.latest.setdefault(phase, {}).update(record)
    for key in _AVERAGED:
      value = number(record.get(key))
      if phase == self.learning and value is not None:
        self.history.setdefault(key, collections.deque(maxlen=_HISTORY)).append(value)
    progress = number(record.get('progress'))
    if progress is not None:
      self.set_progress(progress)

  def value(self, key: str) -> Any:
    """Latest value in the learning phase, else in any phase, else None.

    Raises:
      KeyError: the name is not in `names`.
    """
    names.checked(key)
    own = self.latest.get(self.learning, {})
    if key in own:
      return own[key]
    return next((r[key] for r in self.latest.values() if key in r), None)

  def average(self, key: str) -> float | None:
    """Moving average of success, reward or loss; None before the first value."""
    values = list(self.history.get(key, ()))[-_AVERAGE_STEPS:]
    return stats.moving_average(values, _AVERAGE_STEPS)[-1] if values else None

  def left_s(self) -> float | None:
    """Estimated seconds until the last phase ends; None while there is no estimate.

    The current phase's by its speed; later ones' by the plan, at the same pace.
    """
    later = [p for p in self.phases if p.ended_s is None and p is not self.current]
    if self.current is None:
      return None if later else 0.0
    whole_s = self.current.whole_s()
    if whole_s is None:
      return None
    pace = whole_s / self.current.expected_s
    planned_s = sum(phase.expected_s for phase in later)
    return (1 - self.current.progress) * whole_s + pace * planned_s

  def fraction(self) -> float | None:
    """Completed fraction of the plan, which never falls; None before the first."""
    done = [
      1.0 if phase.ended_s is not None else phase.progress for phase in self.phases
    ]
    if all(part is None for part in done):
      return None
    parts = zip(done, self.phases, strict=True)
    spent_s = sum((part or 0.0) * phase.expected_s for part, phase in parts)
    return spent_s / sum(phase.expected_s for phase in self.phases)


def draw(state: State, width: int) -> Text:
  """The whole view as one text of about 20 lines, each at most `width` cells."""
  width = max(20, width)
  lines = [
    _title(state, width),
    _phases(state),
    _progress_bar(state, width),
    Text(),
    *_learning(state),
    *_flow(state, width),
    *_findings(state.findings, width),
  ]
  snippet = _snippet(state.snippet, width)
  if snippet:
    lines += [Text('─' * 3 + ' latest trajectory ' + '─' * (width - 22), 'dim')]
    lines += snippet
  for line in lines:
    line.truncate(width, overflow='ellipsis')
  text = Text('\n', no_wrap=True, overflow='crop', end='').join(lines)
  text.no_wrap, text.overflow = True, 'crop'
  return text


def plain_line(state: State) -> str:
  """One line of ASCII for logs: phase, time left and the main metrics."""
  phase, fraction, left_s = _where(state), state.fraction(), state.left_s()
  parts = [state.title, clock(time.monotonic() - state.started_s), phase]
  if fraction is not None:
    parts.append(f'total {_percent(fraction)}%')
  if left_s is not None:
    parts.append(f'left {clock(left_s)}')
  for label, value in (
    ('step', state.latest.get(state.learning, {}).get('step')),
    ('success', state.average('success')),
    ('eval', _last_eval(state)),
    ('reward', state.average('reward')),
    ('loss', state.value('loss')),
    ('tokens/s', state.value('tokens_per_s')),
    ('rollouts/s', state.value('rollouts_per_s')),
    ('lag', state.value('policy/lag_mean')),
    ('taken', state.value('pool/taken')),
    ('failed', state.value('pool/failed')),
    ('findings', len(state.findings) or None),
  ):
    if number(value) is not None:
      parts.append(f'{label} {short(value)}')
  parts.append(f'memory {_memory(state)}')
  return ' | '.join(parts)


def news(state: State) -> tuple:
  """What a new `plain_line` is worth printing for: where the run is."""
  step = state.latest.get(state.learning, {}).get('step')
  return _where(state), state.fraction(), step


def _where(state: State) -> str:
  """The phase, its completed fraction and what it is doing."""
  phase = state.current
  if phase is None:
    over = all(phase.ended_s is not None for phase in state.phases)
    return 'done' if over else 'starting'
  known = '' if phase.progress is None else f' {_percent(phase.progress)}%'
  return f'{phase.name}{known}' + (f': {state.doing}' if state.doing else '')


def _percent(fraction: float) -> int:
  """Whole percent, of which 100 is all."""
  return math.floor(100 * fraction + 1e-9)


def clock(seconds: float) -> str:
  """Seconds as m:ss or h:mm:ss."""
  seconds = int(max(0.0, seconds)) if math.isfinite(seconds) else 0
  minutes, seconds = divmod(seconds, 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'


def number(value: Any) -> float | None:
  """The value as a finite number, else None."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return None
  return value if math.isfinite(value) else None


def short(value: Any) -> str:
  """A number in few characters, a dash for None, anything else as text."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if number(value) is None:
    return '-' if value is None else one_line(value, 24)
  if isinstance(value, int) or abs(value) >= 1000:
    return f'{value:,.0f}'
  return f'{value:.1f}' if abs(value) >= 100 else f'{value:.3g}'


def _title(state: State, width: int) -> Text:
  elapsed_s = time.monotonic() - state.started_s
  left_s = state.left_s()
  left = f'{clock(elapsed_s)} elapsed'
  if left_s is not None:
    left += f' · about {clock(left_s)} left'
  rule = '─' * max(1, width - len(state.title) - len(left) - 2)
  return Text.assemble((state.title, 'bold'), ' ', (rule, 'dim'), ' ', left)


def _phases(state: State) -> Text:
  line = Text()
  for phase in state.phases:
    if phase is state.current:
      line.append(f'▶ {phase.name} {clock(phase.elapsed_s())}', 'bold cyan')
      if state.doing:
        line.append(f' {state.doing}', 'cyan')
    elif phase.ended_s is not None and phase.started_s is None:
      line.append(f'– {phase.name}', 'dim')
    elif phase.ended_s is not None:
      line.append('✓ ', 'green').append(f'{phase.name} {clock(phase.elapsed_s())}')
      if phase.note:
        line.append(f' {phase.note}', 'dim')
    else:
      line.append(f'· {phase.name}', 'dim')
    line.append('  ')
  return line


def _progress_bar(state: State, width: int) -> Text:
  fraction = state.fraction()
  cells = max(10, width - 6)
  done = round(cells * (fraction or 0.0))
  known = '' if fraction is None else f' {_percent(fraction):3d} %'
  return Text.assemble(('━' * done, 'cyan'), ('─' * (cells - done), 'dim'), known)


def _learning(state: State) -> list[Text]:
  """Success, reward and loss with sparklines, then metrics of the policy."""
  last_eval = _last_eval(state)
  evaluation = '' if last_eval is None else f'last eval {short(last_eval)}'
  step = state.latest.get(state.learning, {}).get('step')
  return [
    _curve(state, 'success', state.average('success'), evaluation),
    _curve(state, 'reward', state.average('reward'), ''),
    _curve(
      state, 'loss', state.value('loss'), '' if step is None else f'step {short(step)}'
    ),
    _figures(
      'policy',
      ('lag', state.value('policy/lag_mean')),
      ('at most', state.value('policy/lag_max')),
      ('clipped', state.value('clip_fraction')),
      ('ratio', state.value('ratio')),
      ('entropy', state.value('entropy')),
    ),
  ]


def _flow(state: State, width: int) -> list[Text]:
  """Throughput, pool, window and the counters of the services."""
  lines = [
    _figures(
      'speed',
      ('training tokens/s', state.value('tokens_per_s')),
      ('rollouts/s', state.value('rollouts_per_s')),
      ('memory', _memory(state)),
    ),
    _counters(state, 'pool'),
    _window(state, width),
  ]
  return lines + [_counters(state, service) for service in _SERVICES]


def _counters(state: State, service: str) -> Text:
  keys = names.group(service, 'view')
  pairs = [(key.partition('/')[2].replace('_', ' '), state.value(key)) for key in keys]
  return _figures(service, *pairs)


def _findings(found: Sequence[findings.Shown], width: int) -> list[Text]:
  """A line of each finding, at most `_FINDING_LINES`, and how many more there are."""
  lines = []
  for x in found[:_FINDING_LINES]:
    style = 'red' if x.severity == 'error' else 'yellow'
    words = f'{x.kind} {x.where}: {x.summary}'
    lines.append(_label('finding').append(one_line(words, width), style))
  if len(found) > _FINDING_LINES:
    more = f'{len(found) - _FINDING_LINES} more: python -m experiments.doctor'
    lines.append(_label('').append(more, 'dim'))
  return lines


def _label(name: str) -> Text:
  return Text(f'{name:<9}', 'bold')


def _figures(name: str, *pairs: tuple[str, Any]) -> Text:
  line = _label(name)
  for index, (label, value) in enumerate(pairs):
    line.append(' · ' if index else '', 'dim')
    line.append(f'{label} ', 'dim').append(short(value))
  return line


def _curve(state: State, key: str, value: Any, note: str) -> Text:
  line = _label(key).append(f'{short(value):<9}', 'bold green')
  line.append(_sparkline(state.history.get(key, ()), 32), 'cyan')
  return line.append(f'  {note}', 'dim') if note else line


def _sparkline(values: Sequence[float], cells: int) -> str:
  """The latest values as bars, scaled from their minimum to their maximum."""
  values = list(values)
  size = max(1, math.ceil(len(values) / cells))
  means = [
    math.fsum(part) / len(part)
    for part in (values[i : i + size] for i in range(0, len(values), size))
  ]
  if not means:
    return ''
  low, high = min(means), max(means)
  scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
  return ''.join(_BARS[int((mean - low) * scale)] for mean in means).ljust(cells)


def _window(state: State, width: int) -> Text:
  """Draws head 3184 [□■·■□×■]▒░░▒: items from the head on, the window in brackets."""
  line = _label('window')
  if state.window is None:
    return line.append('-')
  states, head, window = state.window
  line.append(f'head {head:,} ', 'dim').append('[')
  cells = max(8, width - len(line) - 2)
  size = len(states) if window is None else window
  # The bracket closes after W positions, even if fewer items were submitted.
  for offset in range(min(max(size, len(states)), cells)):
    signs = _INSIDE if offset < size else _BEYOND
    if offset == size:
      line.append(']')
    item = states[offset] if offset < len(states) else None
    line.append(*signs.get(item, (' ' if item is None else '?', 'dim')))
  if size >= len(states) or size >= cells:
    line.append(']')
  return line


def _last_eval(state: State) -> float | None:
  record = state.latest.get('eval', {})
  successes, n = number(record.get('successes')), number(record.get('n'))
  return successes / n if successes is not None and n else None


def _memory(state: State) -> str:
  rss = number(state.value('memory/rss_bytes')) or metrics.rss_bytes()
  return f'{rss / 2**30:.2f} GiB'


def _snippet(messages: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
  """At most six lines of a trajectory: the task, then the last steps."""
  shown = [step for step in transcript.steps(messages) if step.kind in _STEP_STYLE]
  if len(shown) > _SNIPPET_LINES:
    shown = [shown[0], *shown[1 - _SNIPPET_LINES :]]
  lines = []
  for step in shown:
    who, style = _STEP_STYLE[step.kind]
    lines.append(Text(f'{who:>7}  ', 'dim').append(one_line(step.text, width), style))
  return lines
