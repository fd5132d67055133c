"""The files of an RL step: what each host reads is what process 0 packed for it."""

from __future__ import annotations

import json

import numpy as np

from m2jax import forest
from m2jax.forge.processes.step_files import StepFiles
from m2jax.rl import packing
from tests.rl.test_packing import SIZES, star


def same(a, b):
  for name in forest.TOKEN_FIELDS + forest.TERM_FIELDS:
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_every_host_reads_its_part(tmp_path):
  """Rows and chunks, and rows or chunks alone; a step that a killed process left is
  replaced, and only what no checkpoint needs is deleted."""
  files = StepFiles(tmp_path / 'steps')
  (tmp_path / 'steps' / '3.new').mkdir(parents=True)
  both = packing.pack([star(9, 8), star(4, 3), star(8, 2)], **SIZES)
  batches = both, both._replace(plan=None, chunked=0), both._replace(rows=None)
  for step, batch in enumerate([*batches, batches[0]], start=1):
    step = min(step, 3)  # the last one again
    parts = packing.parts(batch, 2, 2)
    files.write(step, [7, 9], parts)
    for host, want in enumerate(parts):
      got = files.read(step, host, SIZES['buckets'])
      assert (got.rows is None, got.plan is None) == (want.rows is None, not want.plan)
      assert got.chunked == want.chunked
      if want.rows is not None:
        same(got.rows, want.rows)
      if want.plan is not None:
        same(got.plan.tree, want.plan.tree)
        for one, other in zip(got.plan, want.plan, strict=True):
          assert (one.kind, one.start) == (other.kind, other.start)
          same(one.batch, other.batch)
  manifest = json.loads((tmp_path / 'steps/3/manifest.json').read_text())
  assert manifest['items'] == [7, 9] and manifest['chunks'] == len(both.plan)
  assert manifest['rows'] == 2 * len(packing.parts(both, 2, 2)[0].rows.tokens)
  files.prune(2)
  assert [path.name for path in (tmp_path / 'steps').iterdir()] == ['3']
  files.prune(None)
  assert not list((tmp_path / 'steps').iterdir())
