"""TPU kernels compile for the real chip at M2's real sizes, without one (law 7)."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys

import jax.numpy as jnp
import pytest

from m2jax.kernels.token_logprobs.api import _CHUNK_TOKENS
from tests.kernels import tpu_worker

pytestmark = [
  pytest.mark.long,
  pytest.mark.tpu_backend,
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='needs libtpu: pip install jax[tpu]',
  ),
]


@pytest.fixture(scope='module')
def compiled():
  """What the worker found, by case. Its own process: libtpu takes over signals."""
  done = subprocess.run(
    [sys.executable, '-m', 'tests.kernels.tpu_worker'],
    capture_output=True,
    text=True,
    check=False,
  )
  found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == '{']
  return {line['case']: line for line in found}, done.stderr[-2000:]


@pytest.mark.parametrize('case', tpu_worker.LOGPROBS)
def test_logits_never_exist(compiled, case):
  """Head and log-softmax in XLA: no more than the head's two bf16 parts and the logits
  of five chunks of 32, where all logits would be 26 GB, or 3 GB for an eighth of the
  words."""
  found, stderr = compiled
  assert case in found, stderr
  tokens, shards, _ = tpu_worker.LOGPROBS[case]
  words = tpu_worker.M2.vocab_size // shards
  assert tokens == 32 * _CHUNK_TOKENS
  parts = 2 * 2 * tpu_worker.M2.embed_dim * words
  assert found[case]['temp_bytes'] < parts + 5 * 4 * _CHUNK_TOKENS * words


@pytest.mark.parametrize('case', tpu_worker.PAGED)
def test_paged_attention_compiles(compiled, case):
  """One kernel, which needs a few times the memory of its queries and none for the
  cache, also where the tables do not fit scalar memory at once."""
  found, stderr = compiled
  assert case in found, stderr
  memory = found[case]
  assert memory['kernels'] == 1
  assert memory['temp_bytes'] < 5 * memory['output_bytes'] + (4 << 20)


@pytest.mark.parametrize('case', tpu_worker.LAYERS)
def test_layers_do_not_copy_the_cache(compiled, case):
  """Writing a layer's keys and values and reading them again copies no layer: XLA gives
  the cache one layout for both."""
  found, stderr = compiled
  assert case in found, stderr
  assert found[case]['kernels'] == 1
  assert found[case]['temp_bytes'] < layer_bytes(tpu_worker.LAYERS[case]) / 2


def layer_bytes(case) -> int:
  """Of keys, or of values."""
  (stack, dtype), *_ = tpu_worker.paged_shapes(
    *case[:-1], case[-1].get('dtype', jnp.bfloat16)
  )
  return math.prod(stack[1:]) * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(
  'case', (*tpu_worker.ATTENTION, *tpu_worker.MATMUL, *tpu_worker.NORM_ROPE)
)
def test_compiles(compiled, case):
  """All kernels, forward and backward, fit VMEM and scalar memory, and need next to
  nothing in HBM beside their arguments and results, but for the cases that copy."""
  found, stderr = compiled
  assert case in found, stderr
  memory = found[case]
  assert memory['kernels'] == (2 if case in tpu_worker.NORM_ROPE else 3)
  if case in tpu_worker.COPIED:
    assert memory['temp_bytes'] < memory['argument_bytes'] + memory['output_bytes']
  else:
    assert memory['temp_bytes'] < memory['output_bytes'] / 8 + (4 << 20)
