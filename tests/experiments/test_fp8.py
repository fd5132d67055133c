"""A checkpoint in block FP8, from `huggingface.save` to programs that serve it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3

import jax
import numpy as np
import pytest

from experiments import served
from m2jax import config as model_config
from m2jax import forest, model
from m2jax.checkpoint import huggingface
from m2jax.kernels import block_fp8
from m2jax.kernels.block_fp8 import blocks as blocks_lib
from m2jax.kernels.block_fp8 import weights
from m2jax.pool.data_pool import DataPool
from m2jax.rollout.engine.config import EngineConfig
from m2jax.sharding import ONE_DEVICE
from m2jax.text import tokenizer
from tests import quick
from tests.experiments import conftest

CFG = dataclasses.replace(
  model_config.tiny(),
  **dict(vocab_size=512, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2),
  **dict(head_dim=16, rotary_dim=8, expert_dim=16, num_experts=8),
)
TOKENS = 768  # of a sequence: the agent's prompt has many, of this tokenizer


@pytest.fixture(scope='module')
def variables():
  return quick.variables(CFG, 0, noise=0.3)


@pytest.fixture(scope='module')
def exported(variables, tmp_path_factory):
  """The directory."""
  directory = tmp_path_factory.mktemp('fp8') / 'exported'
  tok = tokenizer.train(['cat notes.txt | wc -l'] * 20, CFG.vocab_size)
  huggingface.save(
    *(directory, CFG, variables), dtype='block_fp8', tokenizer=tok.to_json().encode()
  )
  return directory


def test_no_weight_is_dequantised_to_be_served(exported, variables, monkeypatch):
  """Neither to load it nor to place it: the engine has the file's own numbers, a byte
  a weight and four for each block."""
  with monkeypatch.context() as patch:
    patch.setattr(blocks_lib.Blocks, 'astype', None)
    found = served.load(exported, None, ONE_DEVICE, 'block_fp8')
    with served.engine(
      found, EngineConfig(weights_dtype='block_fp8'), ONE_DEVICE
    ) as engine:
      placed = engine.load_params(found.variables)
  quantized = jax.jit(block_fp8.quantize_variables)(variables)
  assert weights.nbytes(placed) == weights.nbytes(quantized)
  stored = [x for x in jax.tree.leaves(placed) if x.dtype == blocks_lib.DTYPE]
  full = jax.tree.leaves(variables['params'])
  linear = sum(x.size for x in stored)
  assert 0.5 < linear / sum(x.size for x in full) < 1
  largest = max(x.size for x in jax.tree.leaves(placed) if x.dtype == np.float32)
  assert largest == CFG.vocab_size * CFG.embed_dim  # embedding and head only


def assert_of_the_file(database, directory, variables):
  """The log-probabilities in a database are those of the dequantised weights, and not
  of the weights that were quantised."""
  with DataPool(f'sqlite:///{database}') as pool:
    with contextlib.closing(sqlite3.connect(database)) as connection:
      sessions = connection.execute('SELECT DISTINCT session FROM completions')
      sessions = [session for (session,) in sessions.fetchall()]
    found = [c for session in sessions for c in pool.completions(session)]
  assert found
  rows = np.zeros((len(found), TOKENS), np.int32)
  for row, completion in zip(rows, found, strict=True):
    path = [*completion.prompt_ids, *completion.response_ids]
    row[: len(path)] = path
  score = jax.jit(lambda v: model.token_logprobs(model.M2(CFG), v, forest.causal(rows)))
  _, dequantized = huggingface.load(directory, dtype='float32')
  errors = {}
  for name, given in (('file', dequantized), ('before', variables)):
    scores = np.asarray(score(given))
    errors[name] = np.concatenate(
      [
        scores[i, len(c.prompt_ids) :][: len(c.response_ids)] - c.logprobs
        for i, c in enumerate(found)
      ]
    )
  assert np.abs(errors['file']).max() < 1e-3 < np.abs(errors['before']).max()


ENGINE = [
  '--config.engine.weights_dtype=block_fp8',
  '--config.engine.slots=4',
  '--config.engine.decode_rows=(4,)',
  f'--config.engine.contexts=({TOKENS},)',
  f'--config.engine.context_tokens={TOKENS}',
  '--config.engine.prefill_shapes=((4,64),)',
]


@pytest.mark.long
def test_evaluate(tmp_path, exported, variables):
  """To a table; every token was drawn from the file's weights."""
  flags = [f'--workdir={tmp_path}', f'--checkpoint={exported}', *ENGINE]
  flags += ['--config.episodes.backend=rlimit_only', '--config.temperatures=(1.0,)']
  flags += ['--config.eval_tasks=3', '--config.episodes.agent.max_tokens=16']
  conftest.run('evaluate', *flags)
  report = json.loads((tmp_path / 'evaluation.json').read_text())
  assert report['checkpoint'] == str(exported) and report['step'] == 0
  assert report['held_out'][0]['tasks'] == 3
  assert_of_the_file(tmp_path / 'evaluation.db', exported, variables)
