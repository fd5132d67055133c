"""No text that a command writes controls the terminal."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import pathlib
import sys

import pytest
import rich.table
from absl import logging as absl_logging
from rich.text import Text

import m2jax
from m2jax.observe import console

ROOT = pathlib.Path(m2jax.__path__[0]).parent
# Clipboard, title, clear screen, link, C1 CSI, right to left, a line written over.
EVIL = '\x1b]52;c;eA==\x07\x1b]0;t\x07\x1b[2J\x1b]8;;http://e\x1b\\x\x9b31m\u202eb\ra'


class Terminal(io.StringIO):
  """A terminal, and what arrives there."""

  def isatty(self):
    return True

  @property
  def controls(self):
    found = self.getvalue()
    return {c for c in found if c != '\n' and not c.isprintable()}


@contextlib.contextmanager
def terminal():
  """The process's terminal, after `install`."""
  found = Terminal()
  handler = absl_logging.get_absl_handler().python_handler
  formatter, stream = handler.formatter, handler.stream
  with contextlib.redirect_stdout(found), contextlib.redirect_stderr(found):
    console.install()
    console.install()
    assert sys.stdout.rich_proxied_file is found
    handler.setStream(found)
    yield found
  handler.setStream(stream)
  handler.setFormatter(formatter)


def test_what_is_printed_and_logged():
  record = logging.LogRecord('x', logging.ERROR, __file__, 1, '%s', (EVIL,), None)
  with pytest.raises(ValueError) as error:
    raise ValueError(EVIL)
  with terminal() as found:
    print(EVIL)
    print(EVIL, file=sys.stderr)
    absl_logging.get_absl_handler().handle(record)
    sys.excepthook(error.type, error.value, error.tb)
    assert sys.stdout.isatty()
  assert found.getvalue().count('⟨U+001B⟩]52') == 4 and not found.controls


def test_what_rich_draws():
  """Only the caller's styles are left, also beside a progress bar; `[` is text."""
  table = rich.table.Table()
  table.add_row(EVIL, '[/x]')
  with terminal() as found:
    console.Console(color_system=None).print(
      EVIL, '[link=u]x[/link]', Text(EVIL), table
    )
    assert not found.controls and '[link=u]' in found.getvalue()
    console.Console(force_terminal=True).print(Text('red', style='red'))
    assert '\x1b[31mred' in found.getvalue()
    with console.progress():
      print('\x1b]8;;http://e\x1b\\link\x1b]8;;\x1b\\ \x9b2J')
  assert 'link' in found.getvalue().partition('red')[2]
  assert '\x1b]8' not in found.getvalue() and '\x9b' not in found.getvalue()


def test_no_command_prints_around_it():
  """Every job goes through `common.run`; nobody makes rich's own console or bar."""
  for path in (ROOT / 'experiments').glob('*.py'):
    text = path.read_text()
    assert ('__main__' in text) == ('  common.run(main' in text), path
  assert '  console.install()' in (ROOT / 'experiments/common.py').read_text()
  for folder in ('m2jax', 'm2jax_pipelines', 'experiments', 'benchmarks'):
    for path in (ROOT / folder).rglob('*.py'):
      text = path.read_text()
      if 'rich' not in text or path.name == 'console.py':
        continue
      for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
          made = ast.unparse(node.func)
          assert made not in ('rich.console.Console', 'Progress', 'rich.print'), path
          assert made != 'rich.progress.Progress', path
