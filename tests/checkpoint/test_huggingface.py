"""Hugging Face checkpoints: what transformers computes, bit-exact round trips, faults.

golden/ was made by transformers (make_golden.py); a live comparison is in
test_transformers.py.
"""

import dataclasses
import json
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from m2jax import model
from m2jax.checkpoint import (
  CheckpointExists,
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
  huggingface,
  leaves,
)
from m2jax.checkpoint.huggingface import fp8, names, safetensors_io, streaming
from m2jax.config import ModelConfig, m2
from m2jax.text import tokenizer
from tests import processes
from tests.checkpoint import parity

GOLDEN = pathlib.Path(__file__).parent / 'golden'
INDEX = 'model.safetensors.index.json'
CASES = (
  'seed0',
  'seed3',
  pytest.param('seed1', marks=pytest.mark.long),
  pytest.param('seed2', marks=pytest.mark.long),
)
CFG = ModelConfig(
  vocab_size=31,
  num_layers=2,
  embed_dim=12,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  rotary_dim=4,
  num_experts=3,
  experts_per_token=2,
  expert_dim=10,
  max_positions=64,
  num_mtp_modules=2,
  dtype='bfloat16',
  remat='layer',
)


def random_variables(cfg=CFG, seed=0):
  """In NumPy. Every number is another one, so that a wrong place shows."""
  rng = np.random.default_rng(seed)
  return leaves.nest(
    {
      leaf: rng.normal(size=shape).astype(jnp.dtype(cfg.param_dtype))
      for leaf, shape in names.shapes(cfg).items()
    }
  )


def narrowed(params):
  """Parameters as loaded in bf16: routers stay fp32."""
  return leaves.nest(
    {
      name: jnp.asarray(leaf, 'float32' if name.endswith('router') else 'bfloat16')
      for name, leaf in leaves.table(params).items()
    }
  )


def files_of(directory):
  """All tensors of a directory by name, read by the library."""
  found = {}
  for path in sorted(pathlib.Path(directory).glob('model*.safetensors')):
    found |= load_file(path)
  return found


def assert_equal(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  assert jax.tree.map(lambda a: a.dtype, ours) == jax.tree.map(
    lambda a: a.dtype, theirs
  )


class TestTransformers:
  """Against what transformers wrote and computed."""

  @pytest.mark.parametrize('case', CASES)
  def test_reads_computes_and_writes_the_same(self, case, tmp_path):
    """GQA groups 1 to 4, all or some dims rotating, both dialects, one file or many:
    its logits and gradients; written again, the names, shapes and bits of
    `save_pretrained`, which other tools read too."""
    cfg, variables = huggingface.load(GOLDEN / case)
    assert cfg.num_mtp_modules == 0  # promised in the released dialect, not there
    parity.check(cfg, variables, load_file(GOLDEN / case / 'expected.safetensors'))
    huggingface.save(tmp_path / 'out', cfg, jax.tree.map(np.asarray, variables))
    want, have = files_of(GOLDEN / case), files_of(tmp_path / 'out')
    assert have.keys() == want.keys()
    for name, value in want.items():
      np.testing.assert_array_equal(have[name], value, strict=True)

  def test_parameters_of_the_release(self):
    """M2 has the parameters and block scales that the published files add up to."""
    cfg = dataclasses.replace(m2(), num_mtp_modules=0)
    tensors = names.tensors(cfg)
    total = sum(int(np.prod(t.shape)) for t in tensors)
    assert total == 228_689_764_864
    scales = sum(
      int(np.prod(fp8.scale_shape(t.shape, (128, 128))))
      for t in tensors
      if 'proj' in t.name or 'experts' in t.name
    )
    assert total + scales == 228_703_644_928


class TestRoundTrip:
  """load(save(x)) is x, bit for bit."""

  @pytest.mark.parametrize(
    ('dtype', 'modules'),
    [('float32', 2), pytest.param('bfloat16', 0, marks=pytest.mark.long)],
  )
  def test_exact(self, tmp_path, dtype, modules, monkeypatch):
    """MTP modules and every config field included; tensors come in many pieces."""
    monkeypatch.setattr(streaming, 'PIECE_BYTES', 100)
    cfg = dataclasses.replace(CFG, param_dtype=dtype, num_mtp_modules=modules)
    variables = jax.tree.map(jnp.asarray, random_variables(cfg))
    variables['router'] = jax.tree.map(
      lambda a: a.astype(jnp.float32), variables['router']
    )
    if dtype == 'bfloat16':
      variables['params'] = narrowed(variables['params'])
    huggingface.save(tmp_path / 'out', cfg, variables, max_shard_bytes=2000)
    again, read = huggingface.load(tmp_path / 'out')
    assert again == cfg
    assert_equal(read, variables)

  def test_shards(self, tmp_path):
    """Files keep to the size asked for; the index says where each tensor is."""
    huggingface.save(tmp_path / 'out', CFG, random_variables(), max_shard_bytes=4000)
    index = json.loads((tmp_path / 'out' / INDEX).read_text())
    files = sorted(tmp_path.glob('out/*.safetensors'))
    assert len(files) > 3
    total = 0
    for path in files:
      with safe_open(path, 'numpy') as file:
        names = list(file.keys())
        size = sum(file.get_tensor(name).nbytes for name in names)
      assert {index['weight_map'][name] for name in names} == {path.name}
      assert size <= 4000 or len(names) == 1
      total += size
    assert total == index['metadata']['total_size']
    assert sorted(index['weight_map']) == sorted(files_of(tmp_path / 'out'))

  def test_numpy_variables(self, tmp_path):
    """What a checkpoint manager restores without a model is saved as it is."""
    variables = jax.tree.map(np.asarray, random_variables())
    huggingface.save(tmp_path / 'out', CFG, variables)
    assert_equal(huggingface.load(tmp_path / 'out')[1], variables)

  def test_dtypes(self, tmp_path):
    """Weights narrow and widen as asked; the router and its bias are never narrowed:
    0.001 steps of it decide which expert is chosen, and bf16 has none above 1."""
    variables = random_variables()
    huggingface.save(tmp_path / 'half', CFG, variables, dtype='bfloat16')
    cfg, read = huggingface.load(tmp_path / 'half')
    assert cfg.param_dtype == 'bfloat16' and cfg.dtype == 'bfloat16'
    half = narrowed(variables['params'])
    assert_equal(read, {'params': half, 'router': variables['router']})
    cfg, read = huggingface.load(tmp_path / 'half', dtype=jnp.float32)
    assert cfg.param_dtype == 'float32'
    assert_equal(read['params'], jax.tree.map(lambda a: a.astype(jnp.float32), half))
    huggingface.save(tmp_path / 'full', CFG, variables)
    cfg, read = huggingface.load(tmp_path / 'full', dtype='bfloat16')
    assert_equal(read, {'params': half, 'router': variables['router']})

  def test_a_release_has_fp32_routers(self, tmp_path, caplog):
    """NeMo Automodel#3674: beside bf16 weights. They stay so, value for value, in
    memory and when written again; rounded, 1.9 % of the tokens would choose other
    experts. Any other tensor that is wider than config.json says is named."""
    variables = random_variables()
    huggingface.save(tmp_path / 'out', CFG, variables, dtype='bfloat16')
    stored = files_of(tmp_path / 'out')
    gate = 'model.layers.1.block_sparse_moe.gate.weight'
    assert stored[gate].dtype == np.float32
    with caplog.at_level('WARNING'):
      cfg, read = huggingface.load(tmp_path / 'out')
      assert not caplog.records
      want = variables['params']['layers']['router']
      np.testing.assert_array_equal(read['params']['layers']['router'], want)
      huggingface.save(tmp_path / 'again', cfg, read)
      again = files_of(tmp_path / 'again')
      np.testing.assert_array_equal(again[gate], stored[gate], strict=True)
      norm = 'model.norm.weight'
      save_file(
        {**stored, norm: stored[norm].astype(np.float32)},
        tmp_path / 'out' / 'model.safetensors',
        {'format': 'pt'},
      )
      huggingface.load(tmp_path / 'out')
    assert f'1 tensors, such as {norm}, are rounded to bfloat16' in caplog.text

  def test_the_model_runs_on_what_was_loaded(self, tmp_path):
    """Structure and dtypes are those of `M2.init`: training and Orbax go on from it."""
    huggingface.save(tmp_path / 'out', CFG, random_variables())
    cfg, read = huggingface.load(tmp_path / 'out')
    tokens = jnp.zeros((1, 2), jnp.int32)
    fresh = jax.eval_shape(model.M2(cfg).init, jax.random.key(0), tokens)
    assert leaves.table(read).keys() == leaves.table(dict(fresh)).keys()
    for name, leaf in leaves.table(dict(fresh)).items():
      assert leaves.spec(leaf) == leaves.spec(leaves.table(read)[name])
    out = jax.eval_shape(model.M2(cfg).apply, read, tokens)
    assert out.shape == (1, 2, CFG.vocab_size)

  def test_tokenizer_travels(self, tmp_path):
    """Its file is the same bytes, and config.json names its first and last token."""
    tokenizer.train(['some text'], 300).save(tmp_path / 'tokenizer.json')
    content = (tmp_path / 'tokenizer.json').read_bytes()
    cfg = dataclasses.replace(CFG, vocab_size=300)
    variables = random_variables(cfg)
    huggingface.save(tmp_path / 'out', cfg, variables, tokenizer=content)
    assert (tmp_path / 'out' / 'tokenizer.json').read_bytes() == content
    tok = tokenizer.load(tmp_path / 'out')
    values = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert values['bos_token_id'] == tok.bos_id
    assert values['eos_token_id'] == tok.eos_id


class TestFp8:
  """Block-FP8 weights, dequantised here block by block with another arithmetic."""

  @pytest.mark.parametrize(
    ('block', 'size'),
    [((5, 3), 13), pytest.param((128, 128), 130, marks=pytest.mark.long)],
  )
  def test_load(self, tmp_path, block, size, monkeypatch):
    """Released block size and others, ragged edges, pieces that cut through blocks."""
    monkeypatch.setattr(streaming, 'PIECE_BYTES', 4 * 7 * size)
    cfg = dataclasses.replace(
      CFG, embed_dim=size, expert_dim=size + 1, num_layers=1, num_mtp_modules=0
    )
    huggingface.save(tmp_path / 'full', cfg, random_variables(cfg))
    stored, want = self.quantise(files_of(tmp_path / 'full'), block)
    directory = tmp_path / 'fp8'
    directory.mkdir()
    save_file(stored, directory / 'model.safetensors')
    values = json.loads((tmp_path / 'full' / 'config.json').read_text())
    values['quantization_config'] = {
      'quant_method': 'fp8',
      'fmt': 'float8_e4m3fn',
      'weight_block_size': list(block),
    }
    values['torch_dtype'] = 'bfloat16'
    (directory / 'config.json').write_text(json.dumps(values))
    cfg, variables = huggingface.load(directory, dtype='float32')
    variables = jax.tree.map(np.asarray, variables)
    huggingface.save(tmp_path / 'again', cfg, variables)
    have = files_of(tmp_path / 'again')
    assert have.keys() == want.keys()
    for name, value in want.items():
      np.testing.assert_array_equal(have[name], value)
    cfg, half = huggingface.load(directory)
    assert cfg.param_dtype == 'bfloat16'
    assert_equal(half['params'], narrowed(variables['params']))

  @staticmethod
  def quantise(tensors, block):
    """The tensors of a release with these weights, and the weights it represents."""
    stored, want = {}, {}
    for name, value in tensors.items():
      if 'proj' not in name and 'experts' not in name:
        stored[name] = want[name] = value
        continue
      rows, columns = value.shape
      scale = np.empty([-(-rows // block[0]), -(-columns // block[1])], np.float32)
      values = np.empty(value.shape, jnp.float8_e4m3fn)
      plain = np.empty(value.shape, np.float64)
      for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
          at = np.s_[
            i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]
          ]
          scale[i, j] = np.abs(value[at]).max() / 448
          values[at] = (value[at] / scale[i, j]).astype(jnp.float8_e4m3fn)
          plain[at] = values[at].astype(np.float64) * np.float64(scale[i, j])
      stored[name], stored[f'{name}_scale_inv'] = values, scale
      want[name] = plain.astype(np.float32)
    return stored, want


@pytest.fixture
def saved(tmp_path):
  """A directory of several files, to be damaged."""
  huggingface.save(tmp_path / 'it', CFG, random_variables(), max_shard_bytes=4000)
  return tmp_path / 'it'


def rewrite(directory, change):
  """Replaces the files by one, with `change(tensors)` applied to all tensors."""
  tensors = files_of(directory)
  change(tensors)
  for path in [*directory.glob('*.safetensors'), *directory.glob('*.index.json')]:
    path.unlink()
  save_file(tensors, directory / 'model.safetensors')


GATE = 'model.layers.1.block_sparse_moe.experts.2.w1.weight'


class TestBadFiles:
  """Each fault names the tensor or file; nothing is half loaded."""

  @pytest.mark.parametrize(
    ('change', 'message'),
    [
      (lambda t: t.pop(GATE), f'{GATE}: missing, should be [10,12]'),
      (
        lambda t: t.update({'model.layers.2.extra': np.zeros(3, np.float32)}),
        'model.layers.2.extra: F32[3] is not part of the model',
      ),
      (
        lambda t: t.update({GATE: np.zeros((12, 10), np.float32)}),
        f'{GATE}: F32[12,10], should be [10,12]',
      ),
      (
        lambda t: t.update({GATE: np.zeros((10, 12), np.int64)}),
        f'{GATE}: dtype I64 is not supported',
      ),
      (
        lambda t: t.update({GATE: np.zeros((10, 12), jnp.float8_e4m3fn)}),
        f'{GATE}_scale_inv: missing, should be [1,1]',
      ),
      (
        lambda t: t.update({f'{GATE}_scale_inv': np.zeros((1, 1), np.float32)}),
        f'{GATE}_scale_inv: F32[1,1] is not part of the model',
      ),
      (
        lambda t: t.pop('model.mtp_layers.1.h_norm.weight'),
        'model.mtp_layers.1.h_norm.weight: missing',
      ),
    ],
    ids=['missing', 'extra', 'shape', 'dtype', 'no scale', 'lone scale', 'mtp'],
  )
  def test_wrong_tensors(self, saved, change, message):
    rewrite(saved, change)
    with pytest.raises(CheckpointMismatch) as error:
      huggingface.load(saved)
    assert message in str(error.value) and str(saved) in str(error.value)

  def test_truncated(self, saved):
    """Cut anywhere: the file and the first tensor that is not whole are named."""
    path = sorted(saved.glob('*.safetensors'))[1]
    whole = path.read_bytes()
    reader = safetensors_io.Reader(path)
    reader.close()
    for name, entry in reader.entries.items():
      path.write_bytes(whole[: entry.offset + 5])
      with pytest.raises(CorruptCheckpoint) as error:
        huggingface.load(saved)
      assert f'tensor {name} ' in str(error.value) and str(path) in str(error.value)
    for size in (0, 7, 8, 100):
      path.write_bytes(whole[:size])
      with pytest.raises(CorruptCheckpoint, match=path.name):
        huggingface.load(saved)

  def test_truncated_while_it_is_read(self, saved):
    """The header was fine, the data is gone since: still named."""
    path = sorted(saved.glob('*.safetensors'))[0]
    reader = safetensors_io.Reader(path)
    name = next(iter(reader.entries))
    os.truncate(path, reader.entries[name].offset + 5)
    with pytest.raises(CorruptCheckpoint, match=f'{path}: .* tensor {name}'):
      reader.rows(name, 0, 2)
    reader.close()

  @pytest.mark.parametrize(
    'header', [b'\xff' * 40, b'[]', b'{"a": 1}', b'{"a": {"dtype": "F32"}}']
  )
  def test_not_safetensors(self, saved, header):
    path = sorted(saved.glob('*.safetensors'))[0]
    path.write_bytes(len(header).to_bytes(8, 'little') + header)
    with pytest.raises(
      CorruptCheckpoint, match=f'{path.name}: cannot read the safetensors'
    ):
      huggingface.load(saved)

  def test_missing_files(self, saved, tmp_path):
    paths = sorted(saved.glob('*.safetensors'))
    paths[2].unlink()
    with pytest.raises(MissingCheckpoint, match=paths[2].name):
      huggingface.load(saved)
    for path in [*saved.glob('*.safetensors'), *saved.glob('*.index.json')]:
      path.unlink()
    with pytest.raises(MissingCheckpoint, match=r'model\.safetensors'):
      huggingface.load(saved)
    (saved / 'config.json').unlink()
    with pytest.raises(MissingCheckpoint, match=r'config\.json'):
      huggingface.load(saved)
    with pytest.raises(MissingCheckpoint, match='gone is not a directory'):
      huggingface.load(tmp_path / 'gone')

  @pytest.mark.parametrize(
    'content', ['', '[]', '{"weight_map": {"a": "../../other.safetensors"}}']
  )
  def test_bad_index(self, saved, content):
    (saved / INDEX).write_text(content)
    with pytest.raises(CorruptCheckpoint, match=INDEX):
      huggingface.load(saved)


class TestSaving:
  """A directory appears whole, or nothing does."""

  def test_a_failed_save_leaves_nothing(self, tmp_path, monkeypatch):
    """The disk is full at the third file."""
    write = safetensors_io.write
    calls = []

    def fails(path, *args):
      calls.append(path)
      if len(calls) == 3:
        raise OSError('No space left on device')
      write(path, *args)

    monkeypatch.setattr(safetensors_io, 'write', fails)
    with pytest.raises(OSError, match='No space'):
      huggingface.save(tmp_path / 'out', CFG, random_variables(), max_shard_bytes=4000)
    assert list(tmp_path.iterdir()) == []

  def test_a_killed_save_is_none(self, tmp_path):
    """SIGKILL in the second file: no directory of that name; the next save clears what
    is left and succeeds."""
    done = processes.run('tests.checkpoint.killed_save', tmp_path / 'out')
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name != 'out' and len(list(left.iterdir())) > 1
    with pytest.raises(MissingCheckpoint):
      huggingface.load(tmp_path / 'out')
    huggingface.save(tmp_path / 'out', CFG, random_variables())
    assert [p.name for p in tmp_path.iterdir()] == ['out']
    assert_equal(huggingface.load(tmp_path / 'out')[1], random_variables())

  def test_refuses_to_overwrite(self, saved):
    before = sorted(saved.iterdir())
    with pytest.raises(CheckpointExists, match=str(saved)):
      huggingface.save(saved, CFG, random_variables())
    assert sorted(saved.iterdir()) == before

  def test_variables_of_another_model(self, tmp_path):
    variables = random_variables()
    variables['params']['layers']['q'] = jnp.zeros((2, 12, 25))
    del variables['params']['layers']['k']
    variables['params']['new'] = jnp.zeros(3)
    with pytest.raises(CheckpointMismatch) as error:
      huggingface.save(tmp_path / 'out', CFG, variables)
    for name in ('layers/q: float32[2,12,25]', 'layers/k: missing', 'params/new'):
      assert name in str(error.value)
    assert list(tmp_path.iterdir()) == []
