"""The site of docs/, as `make docs` builds it, where its tools are installed."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MKDOCS = ROOT / os.environ.get('DOCS_VENV', '.venv-docs') / 'bin' / 'mkdocs'


@pytest.mark.long
@pytest.mark.skipif(not MKDOCS.exists(), reason=f'no {MKDOCS}: `make docs` installs it')
def test_it_builds_in_strict_mode_and_needs_no_other_host(tmp_path):
  """No warning, dead link or anchor; no script, style or image from elsewhere."""
  done = subprocess.run(
    [MKDOCS, 'build', '--quiet', '--site-dir', tmp_path],
    cwd=ROOT,
    env={**os.environ, 'NO_MKDOCS_2_WARNING': '1'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0 and not done.stdout + done.stderr, done.stderr
  for page in tmp_path.rglob('*.html'):
    text = page.read_text()
    assert not re.findall(r'(?:src|srcset)="?(?:https?:)?//', text), page
    assert not re.findall(r'<link[^>]+href="?(?:https?:)?//', text), page
    assert ':::' not in text, page
  assert 'is_weight_max' in (tmp_path / 'reference.html').read_text()
