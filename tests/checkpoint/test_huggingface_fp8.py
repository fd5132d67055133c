"""Block FP8 in the released format: written, read undequantised, computed with."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from m2jax import config, forest, model
from m2jax.checkpoint import CheckpointMismatch, huggingface, leaves
from m2jax.checkpoint.huggingface import names, streaming
from m2jax.config import Matmuls
from m2jax.kernels import block_fp8
from m2jax.kernels.block_fp8 import weights
from tests import processes

_DTYPES = {'F32': np.float32, 'F8_E4M3': jnp.float8_e4m3fn}

# Two blocks a side at least, the last of them ragged.
CFG = dataclasses.replace(
  config.tiny(),
  vocab_size=64,
  num_layers=2,
  embed_dim=160,
  num_heads=5,
  num_kv_heads=1,
  num_experts=3,
  expert_dim=140,
  num_mtp_modules=1,
)


def files_of(directory) -> dict[str, np.ndarray]:
  """All tensors by name; the library's `load_file` has no FP8 in NumPy."""
  found = {}
  for path in sorted(pathlib.Path(directory).glob('model*.safetensors')):
    for name, tensor in safetensors.deserialize(path.read_bytes()):
      values = np.frombuffer(tensor['data'], _DTYPES[tensor['dtype']])
      found[name] = values.reshape(tensor['shape'])
  return found


def random_variables(cfg, seed=0):
  rng = np.random.default_rng(seed)
  return leaves.nest(
    {
      leaf: (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)
      for leaf, shape in names.shapes(cfg).items()
    }
  )


@pytest.fixture(scope='module')
def variables():
  return random_variables(CFG)


@pytest.fixture(scope='module')
def saved(variables, tmp_path_factory):
  """A directory in FP8, written in pieces of one block of rows."""
  directory = tmp_path_factory.mktemp('fp8') / 'out'
  patch = pytest.MonkeyPatch()
  patch.setattr(streaming, 'PIECE_BYTES', 1000)
  huggingface.save(
    directory, CFG, variables, dtype='block_fp8', max_shard_bytes=200_000
  )
  patch.undo()
  return directory


def assert_same(ours, theirs):
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_files_are_as_released(saved, tmp_path, variables):
  """Values and `weight_scale_inv` of q, k, v, o and the experts alone; each block's
  largest weight is ±448 times its scale."""
  huggingface.save(tmp_path / 'full', CFG, variables)
  full, found = files_of(tmp_path / 'full'), files_of(saved)
  quantized = {n for n in full if '_proj.weight' in n or '.experts.' in n}
  assert found.keys() == full.keys() | {n + '_scale_inv' for n in quantized}
  for name in full.keys() - quantized:
    np.testing.assert_array_equal(found[name], full[name])
  for name in quantized:
    values, scale = found[name].astype(np.float64), found[f'{name}_scale_inv']
    assert found[name].dtype == jnp.float8_e4m3fn and scale.dtype == np.float32
    assert scale.shape == tuple(-(-size // 128) for size in values.shape)
    for i, j in np.ndindex(scale.shape):
      at = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
      block = full[name][at]
      assert scale[i, j] == np.abs(block).max() * np.float32(1 / 448)
      assert np.abs(values[at]).max() == 448
      error = np.abs(values[at] * scale[i, j] - block)
      assert (error <= np.maximum(np.abs(block) / 16, scale[i, j] / 1024)).all()
  about = json.loads((saved / 'config.json').read_text())['quantization_config']
  assert about == {
    'quant_method': 'fp8',
    'fmt': 'float8_e4m3fn',
    'activation_scheme': 'dynamic',
    'weight_block_size': [128, 128],
    'modules_to_not_convert': ['gate', 'e_score_correction_bias', 'lm_head'],
  }


def test_blocks_round_trip(saved, tmp_path, variables):
  """load → save → load of blocks changes no bit; neither does quantising in memory."""
  cfg, found = huggingface.load(saved, dtype='block_fp8')
  assert cfg == CFG
  assert block_fp8.are_blocks(found)
  assert_same(found, jax.jit(block_fp8.quantize_variables)(variables))
  huggingface.save(tmp_path / 'again', cfg, found)
  want, have = files_of(saved), files_of(tmp_path / 'again')
  assert have.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_array_equal(have[name], value, strict=True)
  assert_same(huggingface.load(tmp_path / 'again', dtype='block_fp8')[1], found)


def test_computes_with_blocks(saved, variables):
  """Log-probabilities are those of the dequantised weights, from a quarter of the
  memory: a byte a weight, and 4 for each 128x128 of them."""
  cfg, blocks = huggingface.load(saved, dtype='block_fp8')
  _, dequantized = huggingface.load(saved)
  batch = forest.causal(jnp.arange(32).reshape(2, 16) % cfg.vocab_size)
  score = jax.jit(lambda v: model.token_logprobs(model.M2(cfg), v, batch))
  np.testing.assert_allclose(score(blocks), score(dequantized), atol=1e-5)
  assert np.abs(score(blocks) - score(variables)).max() < 0.1
  full = {
    n: a for n, a in variables['params']['layers'].items() if weights.is_linear(n)
  }
  ours = {n: a for n, a in blocks['params']['layers'].items() if weights.is_linear(n)}
  assert 1 / 4 < weights.nbytes(ours) / weights.nbytes(full) < 0.26


@pytest.mark.long
def test_quantised_activations_read_the_blocks_themselves(saved):
  """'block_fp8' multiplies by the stored numbers: as with their fp32 values, whose
  own blocks they are."""
  cfg, blocks = huggingface.load(saved, dtype='block_fp8')
  _, dequantized = huggingface.load(saved)
  cfg = dataclasses.replace(cfg, matmuls=Matmuls('block_fp8'))
  batch = forest.causal(jnp.arange(32).reshape(2, 16) % cfg.vocab_size)
  score = jax.jit(lambda v: model.token_logprobs(model.M2(cfg), v, batch))
  np.testing.assert_allclose(score(blocks), score(dequantized), atol=1e-4)


@pytest.mark.long
def test_on_a_mesh(saved):
  """Blocks are loaded onto a mesh, scored and placed for the engine there; quantised
  matmuls train there as on one device."""
  worker = processes.start('tests.checkpoint.fp8_mesh_worker', saved)
  [(out, err)] = processes.finish([worker], timeout_s=240)
  assert 'all equal' in out, out + err[-3000:]


def test_other_weights_are_refused(saved, tmp_path, variables):
  """Weights that are not stored in FP8 are named, and so is a wish to dequantise."""
  huggingface.save(tmp_path / 'full', CFG, variables)
  with pytest.raises(CheckpointMismatch, match='q_proj.weight: not FP8'):
    huggingface.load(tmp_path / 'full', dtype='block_fp8')
  _, blocks = huggingface.load(saved, dtype='block_fp8')
  with pytest.raises(ValueError, match="dtype='float32'.* block FP8"):
    huggingface.save(tmp_path / 'out', CFG, blocks, dtype='float32')
  missing = jax.tree.map(lambda a: a, blocks)
  del missing['params']['layers']['v']
  with pytest.raises(CheckpointMismatch, match='layers/v/values: missing'):
    huggingface.save(tmp_path / 'out', CFG, missing)
