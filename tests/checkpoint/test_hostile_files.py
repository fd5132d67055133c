"""Checkpoint directories from elsewhere: a named error in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import struct

import pytest

from m2jax.checkpoint import (
  CheckpointManager,
  CheckpointMismatch,
  CorruptCheckpoint,
  bounded,
  initial,
)
from m2jax.checkpoint.huggingface import config as config_lib
from m2jax.checkpoint.huggingface import files, safetensors_io
from tests.checkpoint.test_huggingface_config import RELEASED

DEEP = '[' * 200_000
ONE = {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}


def named(**change):
  return json.dumps({'a': ONE | change})


HEADERS = {
  DEEP: 'nested more than',
  '[]': 'cannot read',
  '{"a": 5}': 'cannot read',
  named(data_offsets=[0.0, 4.0]): "tensor 'a'",
  named(data_offsets=[-4, 0]): "tensor 'a'",
  named(data_offsets=[4, 0]): "tensor 'a'",
  named(data_offsets=[0, 4, 8]): 'cannot read',
  named(data_offsets=[True, 4]): "tensor 'a'",
  named(shape=[1] * 9): "tensor 'a'",
  named(shape=[2**70, 0], data_offsets=[0, 0]): r'a\.shape\[0\].*64 bits',
  named(dtype='\x1b[2J'): r"dtype '\\x1b\[2J'",
  named(dtype=5): 'cannot read',
  '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}': 'finite',
  json.dumps({'a\n': ONE}): r"tensor 'a\\n'",
  json.dumps({'a': ONE, 'b': ONE}): 'tensor b overlaps',
  f'{{"a": {json.dumps(ONE)}, "a": {json.dumps(ONE)}}}': 'duplicate key',
}


@pytest.mark.parametrize('header', HEADERS, ids=lambda text: text[:40])
def test_headers_of_safetensors(header, tmp_path):
  path = tmp_path / 'x.safetensors'
  path.write_bytes(struct.pack('<Q', len(header)) + header.encode() + bytes(4))
  with pytest.raises(CorruptCheckpoint, match=HEADERS[header]) as error:
    safetensors_io.Reader(path)
  assert str(path) in str(error.value) and str(error.value).isprintable()


def test_sparse_files_take_no_memory(tmp_path):
  """Of sizes that no real header, index, config or tokenizer has."""
  path = tmp_path / 'x.safetensors'
  path.write_bytes(struct.pack('<Q', 20 << 30))
  os.truncate(path, 21 << 30)
  with pytest.raises(CorruptCheckpoint, match='header of .* bytes; at most'):
    safetensors_io.Reader(path)
  for name, read in READERS.items():
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 20 << 30)
    with pytest.raises(
      CorruptCheckpoint, match=f'{name}: more than {bounded.MAX_BYTES}'
    ):
      read(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)  # would never end
    with pytest.raises(CorruptCheckpoint, match=f'{name}: not a regular file'):
      read(tmp_path)
    (tmp_path / name).unlink()


def index(directory):
  with contextlib.ExitStack() as stack:
    return files.Shards(directory, stack)


READERS = {
  'config.json': config_lib.read,
  files.INDEX: index,
  'tokenizer.json': initial.tokenizer,
}
WEIGHT_MAPS = [5, ['a'], {'a': 5}, *({'a': f} for f in ('../x', '/x', '', '.', 'a\nb'))]


@pytest.mark.parametrize('weight_map', WEIGHT_MAPS, ids=str)
def test_an_index_names_files_of_the_directory(weight_map, tmp_path):
  (tmp_path / files.INDEX).write_text(json.dumps({'weight_map': weight_map}))
  with pytest.raises(CorruptCheckpoint, match=f'{files.INDEX}: .*weight_map'):
    index(tmp_path)


@pytest.mark.parametrize('name', ['config.json', files.INDEX])
def test_deep_json(name, tmp_path):
  (tmp_path / name).write_text(DEEP)
  with pytest.raises(CorruptCheckpoint, match=f'{name}: .*nested more than'):
    READERS[name](tmp_path)


MANIFESTS = {
  DEEP: 'nested more than',
  '[]': 'host',
  '{"../../x": {"size_bytes": 1, "crc32": 0}}': 'must be a plain file name',
  '{"x": {"size_bytes": 1, "crc32": 0}}': '21474836480 bytes',
}


@pytest.mark.parametrize('manifest', MANIFESTS, ids=lambda text: text[:20])
def test_manifests_of_a_run(manifest, tmp_path):
  """Names are of its own files, whose sizes are compared before they are read."""
  path = tmp_path / 'host'
  path.mkdir()
  (path / 'manifest.json').write_text(manifest)
  (path / 'x').touch()
  os.truncate(path / 'x', 20 << 30)
  with CheckpointManager(tmp_path / 'new', read_only=True) as manager:
    with pytest.raises(CorruptCheckpoint, match=MANIFESTS[manifest]):
      manager._read_host(str(tmp_path))


CONFIGS = [
  {'num_hidden_layers': 2.5},
  {'vocab_size': '4'},
  {'num_hidden_layers': 10**9},
  {'num_hidden_layers': True},
  {'num_local_experts': 10**9},
  {'num_mtp_modules': 10**9},
  {'vocab_size': 10**18},
  {'head_dim': [1]},
  {'rms_norm_eps': 0},
  {'rope_theta': -1.0},
  {'rope_theta': 'x'},
  {'rope_parameters': 5},
  {'rope_parameters': {'rope_theta': [1]}},
  {'m2jax': 5},
  {'m2jax': {'unroll_layers': 'x'}},
  {'attn_type_list': 5},
  {'quantization_config': 5},
  {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': 5}},
  {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [0, True]}},
]


@pytest.mark.parametrize('change', CONFIGS, ids=str)
def test_fields_of_a_config_are_named(change, tmp_path):
  """Also those with which listing the model's tensors would take days."""
  (tmp_path / 'config.json').write_text(json.dumps(RELEASED | change))
  with pytest.raises(CheckpointMismatch, match=next(iter(change))) as error:
    config_lib.read(tmp_path)
  assert str(tmp_path / 'config.json') in str(error.value)


@pytest.mark.parametrize(
  'text', ['{"vocab_size": NaN}', '{"rope_theta": 1e999}', '{"a": 1, "a": 2}']
)
def test_what_is_no_json_for_others(text, tmp_path):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(CorruptCheckpoint, match=r'config\.json: '):
    config_lib.read(tmp_path)
