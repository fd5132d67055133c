"""The order of the rooms (DESIGN §3) is a contract, not a habit."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests import import_graph

_ROOT = Path(__file__).parent.parent


def _lint(config: Path) -> subprocess.CompletedProcess:
  linter = Path(sys.executable).with_name('lint-imports')
  return subprocess.run(
    [linter, '--config', config, '--no-cache'],
    cwd=_ROOT,
    capture_output=True,
    text=True,
  )


@pytest.mark.smoke
def test_rooms_import_only_what_comes_before_them():
  """A room that reaches forward ties a knot that no later change can undo."""
  done = _lint(_ROOT / 'setup.cfg')
  assert done.returncode == 0, done.stdout + done.stderr


def test_the_contract_can_fail(tmp_path):
  """Guards the guard: with two rooms swapped, the linter must object."""
  text = (_ROOT / 'setup.cfg').read_text()
  below, above = '    m2jax.layers\n', '    m2jax.model\n'
  assert above + below in text
  config = tmp_path / 'setup.cfg'
  config.write_text(text.replace(above + below, below + above))
  done = _lint(config)
  assert done.returncode == 1, done.stdout + done.stderr
  assert 'not allowed to import' in done.stdout


def test_the_drawing_is_of_the_code():
  """docs/design.md §3 shows what `python -m tests.import_graph` draws."""
  page = import_graph.PAGE.read_text()
  assert import_graph.written(page, import_graph.draw()) == page


def test_a_cycle_cannot_be_drawn(monkeypatch):
  """Else the arrows of a cycle would be missing: each implies the others."""
  found = {'m2jax.a': {'m2jax.b'}, 'm2jax.b': {'m2jax.a'}, 'm2jax.c': set()}
  monkeypatch.setattr(import_graph, 'imports', lambda package: found)
  with pytest.raises(graphlib.CycleError, match='m2jax.a'):
    import_graph.draw()
