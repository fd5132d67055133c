"""A new field of Forest is one line of its schema: samples and batches have it."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
BEFORE = "  term_sample: Int32[Array, 'B M'] ="
LINE = "  entropy: Float32[Array, 'B M'] = _per_term(np.float32, default=0.5)\n"
PROGRAM = f"""
import pathlib, sys, types
path = pathlib.Path('m2jax/forest/types.py')
text = path.read_text()
assert text.count({BEFORE!r}) == 1
new = types.ModuleType('m2jax.forest.types')
sys.modules[new.__name__] = new
exec(compile(text.replace({BEFORE!r}, {LINE + BEFORE!r}), str(path), 'exec'), vars(new))

import numpy as np
from m2jax import forest, sharding
from m2jax.rl import packing

one = forest.Sample(np.array([1, 2, 3, 4]), prompt_length=2, entropy=np.array([6., 7.]))
two = forest.Sample(np.array([1, 2, 3, 5]), prompt_length=2)
batch = forest.merge([one, two], row_tokens=8)
terms = sorted(zip(batch.term_sample[0].tolist(), batch.entropy[0].tolist()))
assert terms == [(0, 6.), (0, 7.), (1, .5), (1, .5)], terms
chunks = forest.cut(forest.merge([one, two]), forest.Buckets((64,), (64,)))
assert sum(chunk.batch.entropy.sum() for chunk in chunks) == 14
assert (forest.causal(np.array([[1, 2, 3]])).entropy == .5).all()
assert forest.select(batch, [0], row_terms=6).entropy.shape == (1, 6)
assert sharding.batch_specs(sharding.PRESETS['data']).entropy is not None
try:
  forest.merge([forest.Sample(np.array([1, 2]), 1, entropy=np.ones(2))])
except ValueError as error:
  assert 'entropy has length 2' in str(error)
else:
  raise AssertionError('a wrong length was accepted')
print('ok')
"""


def test_a_new_field_is_one_line():
  """Merging, cutting, selecting, sharding and `Sample` read it from the schema."""
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == 'ok\n'
