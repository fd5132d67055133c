"""Law 6 for imported weights: any mesh, any number of processes, the same model."""

import dataclasses
import re

import numpy as np
import pytest

from m2jax.checkpoint import huggingface
from tests import processes
from tests.checkpoint.test_huggingface import CFG, files_of, random_variables

MESH_CFG = dataclasses.replace(
  CFG,
  vocab_size=32,
  embed_dim=16,
  num_experts=4,
  expert_dim=16,
  param_dtype='bfloat16',
)


@pytest.mark.parametrize('count', [1, pytest.param(2, marks=pytest.mark.long)])
def test_load_and_save_on_a_mesh(tmp_path, count):
  """8 devices (expert 2 × fsdp 2 × tensor 2) of one process and of two: every shard is
  its slice of the whole. A process reads only the experts that it holds, as many rows
  as its share where it holds columns, and each writes its share of files; together they
  are the same checkpoint again."""
  huggingface.save(tmp_path / 'in', MESH_CFG, random_variables(MESH_CFG))
  port = processes.free_port()
  workers = [
    processes.start(
      'tests.checkpoint.huggingface_worker',
      *(process, count, port, tmp_path / 'in', tmp_path / 'out'),
    )
    for process in range(count)
  ]
  results = processes.finish(workers, timeout_s=240)
  for out, err in results:
    match = re.search(r'^read (\d+) and (\d+) of (\d+)$', out, re.MULTILINE)
    assert match, out + err[-3000:]
    read, halves, stored = map(int, match.groups())
    if count == 1:
      assert read == halves == stored
    else:
      # Experts, most of this model, are read by one process alone.
      assert read < 0.7 * stored
      # Both read norms, biases, and matrices whose rows do not divide: k, v, router.
      assert halves < 0.57 * stored
  assert len(list((tmp_path / 'out').glob('*.safetensors'))) > count
  want, have = files_of(tmp_path / 'in'), files_of(tmp_path / 'out')
  assert have.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_array_equal(have[name], value)
