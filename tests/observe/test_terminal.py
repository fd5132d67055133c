"""The terminal view: any record is drawn, the terminal is left as it was."""

from __future__ import annotations

import contextlib
import io
import logging as std_logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import rich.console
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.observe import frame, progress, terminal
from tests.waiting import wait_until

PHASES = {'setup': 20, 'SFT': 100, 'eval': 10, 'RL': 300, 'report': 5}
HOSTILE = '\x1b[2J\x1b]0;owned\x07\r[bold red]no[/] \u202egnp.exe\x9b31m\ud800'
FULL_RECORD = {
  'phase': 'rl',
  'step': 41,
  'loss': 0.0123,
  'success': 0.5,
  'reward': 0.75,
  'tokens_per_s': 19234.0,
  'rollouts_per_s': 43.2,
  'policy/lag_mean': 1.25,
  'policy/lag_max': 4,
  'clip_fraction': 0.01,
  'ratio': 1.001,
  'entropy': 0.4,
  'pool/pending': 60,
  'pool/completed': 4,
  'pool/taken': 3172,
  'pool/failed': 1,
  'engine/active_slots': 58,
  'gateway/forks': 3,
  'gateway/overrides': 2,
}
MESSAGES = [
  {'role': 'system', 'content': 'You have a shell.'},
  {'role': 'user', 'content': 'How many lines?'},
  {
    'role': 'assistant',
    'reasoning_content': 'Count them.',
    'content': '',
    'tool_calls': [
      {'function': {'name': 'bash', 'arguments': '{"command": "wc -l a.txt"}'}}
    ],
  },
  {'role': 'tool', 'content': '14 a.txt\n'},
  {'role': 'assistant', 'content': '14'},
]


def _console(width: int = 100, *, is_terminal: bool = True) -> rich.console.Console:
  return rich.console.Console(
    file=io.StringIO(),
    force_terminal=is_terminal,
    width=width,
    height=40,
    color_system='256' if is_terminal else None,
    _environ={'TERM': 'xterm-256color'},
  )


def _frame(view: terminal.RunView, width: int = 100) -> list[str]:
  """What the view draws, as plain lines."""
  console = _console(width)
  console.print(view._draw())
  text = console.file.getvalue()
  return re.sub(r'\x1b\[[0-9;]*m', '', text).split('\n')[:-1]


def test_the_frame_holds_the_figures_a_person_looks_for():
  """Issue's list: phase, time left, success, reward, tokens/s, lag, pool, window."""
  view = terminal.RunView(PHASES, console=_console())
  view.begin('SFT')
  view.begin('RL')
  view.on_record({'phase': 'eval', 'family': 'all', 'successes': 30, 'n': 40})
  view.on_record({'phase': 'eval', 'family': 'count', 'successes': 0, 'n': 5})
  view.on_record({'phase': 'eval', 'temperature': 0, 'successes': 1, 'n': 40})
  view.on_record({**FULL_RECORD, 'success': 0.25, 'progress': 0.1})
  view.on_record({**FULL_RECORD, 'success': 0.75, 'progress': 0.2})
  view.set_snippet(MESSAGES)
  lines = _frame(view)
  text = '\n'.join(lines)
  by_label = {line.split(' ')[0]: line for line in lines if line}
  assert '▶ RL' in text
  assert '✓ SFT' in text
  assert '– setup' in text  # jumped over, as a resumed run does
  assert '· report' in text
  assert 'left' in lines[0]
  assert '0.5 ' in by_label['success']  # the mean of 0.25 and 0.75
  assert 'last eval 0.75' in by_label['success']
  assert '0.75' in by_label['reward']
  assert 'lag 1.25 · at most 4 · clipped 0.01 · ratio 1' in by_label['policy']
  assert '19,234' in by_label['speed']
  assert '43.2' in by_label['speed']
  assert re.search(r'memory [0-9.]+ GiB', by_label['speed'])
  pool = by_label['pool']
  assert 'pending 60 · completed 4 · taken 3,172 · failed 1' in pool
  assert 'forks 3 · overrides 2' in by_label['gateway']
  snippet = [line.strip() for line in lines[-5:]]
  assert [line.split()[0] for line in snippet] == ['task', 'think', '$', '→', 'answer']
  assert snippet[2].endswith('wc -l a.txt')


_NASTY = st.one_of(
  st.none(), st.floats(), st.integers(), st.booleans(), st.text(), st.just(HOSTILE)
)
_JSON = st.recursive(
  _NASTY, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(), c, max_size=3)
)
_MESSAGE = st.dictionaries(
  st.sampled_from(['role', 'content', 'reasoning_content', 'tool_calls']),
  _JSON | st.sampled_from(['assistant', 'user', 'tool', HOSTILE]),
)


@settings(deadline=None, max_examples=50)
@given(
  records=st.lists(
    st.dictionaries(
      st.sampled_from([*FULL_RECORD, 'successes', 'n', 'family', 'progress', 'x/y']),
      _NASTY | st.sampled_from(['rl', 'sft', 'eval']),
    ),
    max_size=6,
  ),
  messages=st.lists(_MESSAGE | _JSON, max_size=4),
  states=st.lists(
    st.sampled_from(['pending', 'completed', 'taken', 'failed', 'odd']), max_size=90
  ),
  window=st.none() | st.integers(1, 120),
  width=st.integers(20, 160),
)
def test_any_input_is_drawn_within_the_width_and_nothing_is_obeyed(
  records, messages, states, window, width
):
  """Missing and hostile fields: no exception, no tearing, no control characters."""
  view = terminal.RunView(PHASES, console=_console(width))
  view.begin('RL')
  for record in records:
    view.on_record(record)
  view.set_window(states, head=3, window=window)
  view.set_snippet(messages)
  lines = _frame(view, width)
  assert not any('cannot be drawn' in line for line in lines)
  assert len(lines) <= 24
  for line in lines:
    assert frame.Text(line).cell_len <= width
    assert not re.search('[\x00-\x1f\x7f-\x9f\u202a-\u202e]', line)
  view._state.current = None
  frame.plain_line(view._state).encode('ascii', 'replace')


def test_the_window_strip_shows_what_may_be_taken_and_what_is_forbidden():
  """The report's Figure 5: N = 8, W = 4, head 7 running, 8–10 taken, 11+ blocked."""
  view = terminal.RunView(PHASES, console=_console())
  states = ['pending', 'taken', 'taken', 'taken', 'completed', 'pending', 'failed']
  view.set_window(states, head=7, window=4)
  (line,) = [line for line in _frame(view) if line.startswith('window')]
  assert line.endswith('head 7 [□···]▒░×')
  view.set_window(['completed', 'pending'], head=7, window=4)
  (line,) = [line for line in _frame(view) if line.startswith('window')]
  assert line.endswith('head 7 [■□  ]')
  view.set_window(['completed', 'pending'], head=7, window=None)  # greedy
  (line,) = [line for line in _frame(view) if line.startswith('window')]
  assert line.endswith('head 7 [■□]')


def test_time_left_is_that_of_what_was_measured():
  """By hand; nothing is claimed before the first progress, nor of compilation."""
  phases = [frame.Phase('a', 10), frame.Phase('b', 50), frame.Phase('c', 40)]
  state = frame.State('t', phases, time.monotonic())
  assert (state.fraction(), state.left_s()) == (None, None)
  assert 'total' not in frame.plain_line(state)
  state.begin('b')  # a was jumped over
  assert (state.fraction(), state.left_s()) == (0.1, None)
  state.set_progress(0.2)
  state.current.first = time.monotonic() - 30, 0.2  # after a minute of compilation
  assert state.left_s() is None
  state.set_progress(0.8)  # 0.6 in 30 s: 50 s for b, as planned
  assert state.left_s() == pytest.approx(0.2 * 50 + 40, abs=1)
  assert state.fraction() == pytest.approx(0.1 + 0.5 * 0.8)
  state.end_current()
  state.begin('c')
  assert (state.fraction(), state.left_s()) == (pytest.approx(0.6), None)
  state.end_current()
  assert (state.fraction(), state.left_s()) == (1, 0)
  assert 'done | total 100% | left 0:00' in frame.plain_line(state)


@given(st.lists(st.floats() | st.sampled_from(['next', 'again']), max_size=30))
def test_progress_never_goes_backwards(events):
  """Whatever is reported; and it is 100 % when the last phase has ended, not before."""
  view = terminal.RunView(PHASES, console=_console())
  names, shown = list(PHASES), [0.0]
  view.begin(names[0])
  for event in events:
    if event == 'next' and len(names) > 1:
      del names[0]
    if event in ('next', 'again'):
      view.begin(names[0])
    else:
      view.set_progress(event)
      view.on_record({'progress': event})
    shown.append(view._state.fraction() or 0.0)
  assert shown == sorted(shown)
  assert '100%' not in frame.plain_line(view._state).partition('total')[2] or (
    names[0] == 'report' and view._state.current.progress == 1
  )
  view.begin('report')
  view.done()
  assert view._state.fraction() == 1


def test_what_a_phase_is_doing_is_shown():
  """Reports come from rooms that do not know the view, and end with the phase."""
  view = terminal.RunView(PHASES, console=_console())
  progress.report('nobody listens')
  with progress.listening(view.on_progress):
    view.begin('SFT')
    report = progress.counted('compiling', 9)
    report()
    report()
    assert 'SFT: compiling 2 of 9' in frame.plain_line(view._state)
    assert 'SFT 0:00 compiling 2 of 9' in '\n'.join(_frame(view))
    view.begin('eval')
    assert 'compiling' not in frame.plain_line(view._state)


def test_without_a_terminal_it_prints_plain_lines():
  """CI and pipes: a line when something changed, no escape codes, and phase changes."""
  console = _console(is_terminal=False)
  with terminal.RunView(PHASES, console=console, plain_every_s=0.05) as view:
    assert not view.interactive
    view.begin('SFT')
    view.begin('RL')
    view.on_record(FULL_RECORD)
    wait_until(lambda: console.file.getvalue().count('success 0.5') >= 1)
    time.sleep(0.2)
    assert console.file.getvalue().count('success 0.5') == 1
    view.on_record({**FULL_RECORD, 'step': 42, 'progress': 0.1})
    wait_until(lambda: console.file.getvalue().count('success 0.5') >= 2)
    view.on_record({**FULL_RECORD, 'step': 43, 'progress': 0.2})
    wait_until(lambda: '| left' in console.file.getvalue())
    view.done('fine')
  text = console.file.getvalue()
  lines = text.splitlines()
  figures = [line for line in lines if 'success 0.5' in line]
  assert all('tokens/s 19,234' in line for line in figures)
  assert any('SFT: done' in line for line in lines)
  assert any('RL: started' in line for line in lines)
  assert any('RL: done' in line and '(fine)' in line for line in lines)
  assert '\x1b' not in text
  assert text.isascii()


def test_a_closed_pipe_does_not_stop_the_run():
  """`make forge | head` must not kill the training."""
  read_fd, write_fd = os.pipe()
  file = os.fdopen(write_fd, 'w')
  console = rich.console.Console(file=file, force_terminal=False)
  with terminal.RunView(PHASES, console=console, plain_every_s=0.02) as view:
    os.close(read_fd)
    view.begin('RL')
    time.sleep(0.1)
    view.done()
  with contextlib.suppress(BrokenPipeError):
    file.close()


def test_constructor_and_phases_are_checked():
  """Law 9: the message says what was wrong."""
  with pytest.raises(ValueError, match='phases is empty'):
    terminal.RunView({})
  with pytest.raises(ValueError, match='refresh_hz=9'):
    terminal.RunView(PHASES, refresh_hz=9)
  view = terminal.RunView(PHASES, console=_console())
  with pytest.raises(ValueError, match='setup, SFT, eval, RL, report'):
    view.begin('SLF')


def test_live_view_gives_the_terminal_and_the_log_handlers_back():
  """After stop: cursor shown, redirections undone, also when the body raises."""
  handler = std_logging.StreamHandler(sys.__stderr__)
  std_logging.getLogger().addHandler(handler)
  absl_handler = logging.get_absl_handler().python_handler
  before = sys.stdout, sys.stderr, handler.stream, absl_handler.stream
  console = _console()
  try:
    with pytest.raises(KeyboardInterrupt):
      with terminal.RunView(PHASES, console=console, refresh_hz=4) as view:
        assert view.interactive
        view.begin('RL')
        handler.emit(std_logging.LogRecord('x', 20, 'f', 1, 'a log line', None, None))
        time.sleep(0.4)
        raise KeyboardInterrupt
  finally:
    std_logging.getLogger().removeHandler(handler)
  assert (sys.stdout, sys.stderr, handler.stream, absl_handler.stream) == before
  output = console.file.getvalue()
  assert 'a log line' in output  # through the view's console, so above the drawing
  assert output.rindex('\x1b[?25h') > output.rindex('\x1b[?25l')
  view.stop()


_PROGRAM = """
import sys, time
from absl import app, logging
from m2jax.observe import terminal

def main(_):
  logging.set_verbosity(logging.INFO)
  with terminal.RunView({'SFT': 5, 'RL': 5}, refresh_hz=4) as view:
    view.begin('RL')
    for step in range(200):
      view.on_record({'phase': 'rl', 'step': step, 'loss': 0.1, 'success': 0.5})
      if step == 3:
        logging.info('a line from the log')
        print('a line from print')
      time.sleep(0.05)

app.run(main)
"""


def _read(fd: int, seconds: float, until: bytes | None = None) -> bytes:
  data, end_s = b'', time.monotonic() + seconds
  while time.monotonic() < end_s and (until is None or until not in data):
    if select.select([fd], [], [], 0.05)[0]:
      try:
        data += os.read(fd, 65536)
      except OSError:  # the other side has closed the terminal
        break
  return data


def test_on_a_real_terminal_ctrl_c_leaves_it_clean():
  """A pseudo-terminal, a real SIGINT: cursor back, log line printed once, whole."""
  leader, follower = pty.openpty()
  child = subprocess.Popen(
    [sys.executable, '-c', _PROGRAM],
    stdin=follower,
    stdout=follower,
    stderr=follower,
    env={**os.environ, 'TERM': 'xterm-256color', 'COLUMNS': '100', 'LINES': '40'},
  )
  os.close(follower)
  try:
    output = _read(leader, 30, until=b'a line from print')
    output += _read(leader, 1)
    child.send_signal(signal.SIGINT)
    output += _read(leader, 10)
    child.wait(10)
  finally:
    child.kill()
    os.close(leader)
  text = output.decode()
  assert child.returncode != 0
  assert 'KeyboardInterrupt' in text
  assert text.rindex('\x1b[?25h') > text.rindex('\x1b[?25l')
  assert text.index('\x1b[?25h') < text.index('Traceback')
  assert text.count('a line from the log') == 1
  # Both are on their own lines, not inside the drawing.
  plain = re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', text).replace('\r', '\n').split('\n')
  assert any(re.fullmatch(r'I\d.*\] a line from the log *', line) for line in plain)
  assert any(re.fullmatch(r'a line from print *', line) for line in plain)


def test_a_refresh_is_cheap():
  """The processor belongs to the run: 2 ms here at two a second, 30 with slack."""
  console = _console()
  view = terminal.RunView(PHASES, console=console)
  view.begin('RL')
  view.on_record(FULL_RECORD)
  view.set_window(['pending', 'completed'] * 32, head=3, window=19)
  view.set_snippet([*MESSAGES, {'role': 'tool', 'content': 'x' * 10**6}])
  costs_s = []
  for _ in range(10):
    start_s = time.thread_time()
    console.print(view._draw())
    costs_s.append(time.thread_time() - start_s)
  assert min(costs_s) < 0.03
