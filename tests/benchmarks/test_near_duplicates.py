"""The count of near-duplicates is the pipeline's: against those that were kept."""

import pytest

from benchmarks import near_duplicates
from m2jax_pipelines.candidate import Candidate

pytest.importorskip('datasketch', reason='pip install -e ./m2jax_pipelines')


def test_a_candidate_is_compared_with_those_that_were_kept():
  """b repeats a and is not kept, so that c, which repeats b alone, is."""
  facts = {'a': 'wxyz', 'b': 'xyzv', 'c': 'yzvu', 'd': 'qrst'}
  candidates = [
    Candidate(name, 'stage', 'family', 'source', own=tuple(own))
    for name, own in facts.items()
  ]
  found = near_duplicates.rejected(candidates, 0.6, lambda candidate: candidate.own)
  assert [candidate.id for candidate in found] == ['b']


def test_an_unknown_pipeline_is_named(capsys):
  with pytest.raises(SystemExit):
    near_duplicates.main(['nothing'])
  assert "['nothing']" in capsys.readouterr().err
