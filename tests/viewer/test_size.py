"""A large run paints first in under two seconds; of 50 MB, or PAINT_MB."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests import processes


@pytest.mark.long
@pytest.mark.skipif(not shutil.which('chromium'), reason='apt-get install chromium')
def test_a_large_run_paints_soon():
  """The benchmark's run, from a server, opened in headless Chromium: list and tokens of
  a trajectory in the middle are there soon, too."""
  size = os.environ.get('PAINT_MB', '50')
  flags = f'--pool_mb={size}', '--nofile', '--json'
  done = processes.run('benchmarks.viewer', *flags, timeout_s=580)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['pool_mb'] > 0.9 * int(size), found
  assert max(found['server'].values()) < 2.0, found['server']
