"""Law 6 for imported weights: any mesh, any number of processes, the same model."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from m2jax import params
from m2jax.checkpoint import huggingface, manager, policy
from m2jax.text import tokenizer
from tests import processes
from tests.checkpoint.test_huggingface import CFG, files_of, random_variables

MESH_CFG = dataclasses.replace(
  CFG,
  vocab_size=32,
  embed_dim=16,
  head_dim=4,  # as many numbers as embed_dim: fewer shapes, each compiled 8 times
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


LARGE = dataclasses.replace(
  CFG,
  vocab_size=4096,
  num_layers=8,
  embed_dim=512,
  num_heads=8,
  head_dim=64,
  num_experts=16,
  expert_dim=1024,
  num_mtp_modules=0,
  param_dtype='bfloat16',
)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['released', 'checkpoint'])
def test_a_process_reads_its_share(tmp_path, kind):
  """Two processes read 420 MB, half of the columns each. Memory of released weights is
  bounded too: no host of a pod could hold the whole model. (Orbax has what it reads
  twice, for a moment; and a leaf of one chunk is read whole, by each device if not at
  the same time.)"""
  tokenizer.train(['some text'], 300).save(tmp_path / policy.TOKENIZER_FILE)
  content = (tmp_path / policy.TOKENIZER_FILE).read_bytes()
  small = dataclasses.replace(LARGE, num_layers=1, num_experts=4)
  rng = np.random.default_rng(0)
  for name, cfg in {'small': small, 'large': LARGE}.items():
    variables = jax.tree.map(  # bits that cannot be compressed
      lambda x: np.frombuffer(rng.bytes(x.size * x.dtype.itemsize), x.dtype).reshape(
        x.shape
      ),
      params.shapes(cfg),
    )
    if kind == 'released':
      huggingface.save(tmp_path / name, cfg, variables, tokenizer=content)
    else:
      with manager.CheckpointManager(tmp_path / name) as checkpoints:
        files = {policy.TOKENIZER_FILE: content}
        checkpoints.save(
          0, {'variables': variables}, host=policy.host(cfg), files=files
        )
  sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params.shapes(LARGE))]
  twice = 2 * sum(size for size in sizes if size <= manager.CHUNK_BYTES)
  whole = twice if kind == 'checkpoint' else 0
  port = processes.free_port()
  workers = [
    processes.start(
      'tests.checkpoint.memory_worker',
      *(process, 2, port, tmp_path / 'small', tmp_path / 'large'),
    )
    for process in range(2)
  ]
  for out, err in processes.finish(workers, timeout_s=240):
    match = re.search(r'^held (\d+) read (\d+) peak (\d+)$', out, re.MULTILINE)
    assert match, out + err[-3000:]
    held, read, peak = map(int, match.groups())
    assert held > 200e6
    assert read < 1.01 * held + whole, (held, read)
    assert kind != 'released' or peak < 1.6 * held, (held, peak)  # all is twice that
