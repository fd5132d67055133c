"""The first operation and token that differ are those of a fault that is there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks import first_difference
from m2jax.records import Completion
from tests.rollout import conftest as small
from tests.rollout.engine.test_engine import prompt

CFG = dataclasses.replace(small.CFG, num_layers=2, numerics='invariant')
CONFIG = dataclasses.replace(small.ENGINE_CONFIG, contexts=(small.CONTEXT,))


def completion(turn: int, before: list[int], response: list[int]) -> Completion:
  n = len(response)
  return Completion(
    *(str(turn), 'session', turn, None, None, before, response, np.zeros(n)),
    versions=np.zeros(n, np.int32),
    finish_reason='stop',
    status='ok',
  )


# The second prompt extends the first completion, by more than a chunk.
FIRST = prompt(1, 11), prompt(2, 3)
COMPLETIONS = [
  completion(0, *FIRST),
  completion(1, [*FIRST[0], *FIRST[1], *prompt(3, 12)], prompt(4, 2)),
]


@pytest.fixture(scope='module')
def variables():
  return small.init(0, CFG)


def test_there_is_none(variables):
  """Between an engine and a learner with invariant numerics."""
  found = first_difference.differences(CFG, variables, CONFIG, COMPLETIONS)
  assert found == ([], 0.0)


def test_a_fault_is_found(variables):
  """In one matrix of the last layer of the engine's weights; everything before it is
  equal. A token of the embedding counts from where it first is."""
  params = dict(variables['params'])
  layers = dict(params['layers'], down=params['layers']['down'].at[1].multiply(1.001))
  faulty = {**variables, 'params': dict(params, layers=layers)}
  found, unseen = first_difference.differences(
    *(CFG, variables, CONFIG, COMPLETIONS), of_engine=faulty
  )
  assert (found[0].layer, found[0].operation) == (1, 'experts')
  assert (found[0].completion, found[0].token) == (0, 0)
  assert found[0].differing == found[0].of == 13 + 27
  last = found[-1]
  assert last.operation == first_difference.LOGPROB and last.of == 3 + 2
  assert last.token == 11 and 0 < unseen == last.largest < 0.1
  text = first_difference.table(
    {'differences': [d._asdict() for d in found], 'logprob_without_callbacks': unseen}
  )
  assert '| 1 ' in text.splitlines()[2] and 'experts' in text.splitlines()[2]
  word = COMPLETIONS[0].tokens[5]
  params = dict(params, embed=params['embed'].at[word].multiply(2))
  found, _ = first_difference.differences(
    *(CFG, variables, CONFIG, COMPLETIONS), of_engine={**variables, 'params': params}
  )
  at = np.flatnonzero(COMPLETIONS[0].tokens == word)[0]
  assert found[0][:2] == (-1, 'embedding') and found[0].token == at


@pytest.mark.parametrize('name', ['none', 'settings'])
def test_what_is_wrong_with_the_command(name, tmp_path, monkeypatch, capsys):
  """One line and code 2, no traceback."""

  def measure(args):
    if name == 'settings':
      dataclasses.replace(CFG, numerics='exact')
    return measured(args)

  measured = first_difference.measure
  monkeypatch.setattr(first_difference, 'measure', measure)
  monkeypatch.setattr('sys.argv', ['first_difference', f'--workdir={tmp_path / name}'])
  with pytest.raises(SystemExit) as ended:
    first_difference.main()
  said = capsys.readouterr().err
  assert ended.value.code == 2 and said.startswith('error: ') and len(said) < 200
