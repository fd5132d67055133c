"""The notebooks run from top to bottom, as a reader runs them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.long
@pytest.mark.parametrize(
  'path', sorted((ROOT / 'notebooks').glob('*.ipynb')), ids=lambda path: path.stem
)
def test_notebook(path, tmp_path):
  """Every code cell but those for Colab, in one process; their assertions hold."""
  cells = json.loads(path.read_text())['cells']
  code = '\n\n'.join(
    ''.join(cell['source'])
    for cell in cells
    if cell['cell_type'] == 'code' and 'colab' not in cell['metadata'].get('tags', ())
  )
  assert all(not c.get('outputs') for c in cells)  # what was printed once goes stale
  (tmp_path / 'cells.py').write_text(code)
  done = subprocess.run(
    [sys.executable, str(tmp_path / 'cells.py')],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
