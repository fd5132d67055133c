"""The notebooks run from top to bottom in a kernel, as a reader runs them."""

import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PATHS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
notebooks = pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)


@notebooks
def test_it_has_no_outputs(path):
  """They go stale, and hide from a reader what their own machine does."""
  for cell in nbformat.read(path, as_version=4).cells:
    assert not cell.get('outputs') and not cell.get('execution_count'), cell.source


@pytest.mark.long
@notebooks
def test_it_runs(path):
  """Every cell, with the settings of the cell `parameters` made small."""
  notebook = nbformat.read(path, as_version=4)
  for cell in notebook.cells:
    if 'parameters' in cell.metadata.get('tags', ()):
      assert cell.source.startswith('SMALL = False'), 'readers run it as it is'
      cell.source = 'SMALL = True'
  place = {'metadata': {'path': str(ROOT)}}
  nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
