"""Law 6: a checkpoint resumes on another mesh. In its own process: 8 CPU devices."""

import os
import pathlib
import subprocess
import sys

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from m2jax.checkpoint import CheckpointManager

jax.config.update('jax_num_cpu_devices', 8)
devices = np.array(jax.devices())
save_mesh = jax.sharding.Mesh(devices.reshape(4, 2), ('fsdp', 'expert'))
values = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

def placed(mesh, spec):
  return jax.device_put(values, NamedSharding(mesh, spec))

with CheckpointManager(sys.argv[1]) as manager:
  state = {
    'w': placed(save_mesh, P('fsdp', 'expert')),
    'key': jax.device_put(jax.random.key(3), NamedSharding(save_mesh, P())),
  }
  manager.save(1, state)

meshes = {
  'other axes': (devices.reshape(2, 4), P('expert', 'fsdp')),
  'fewer devices': (devices[:2].reshape(2, 1), P(None, 'fsdp')),
}
manager = CheckpointManager(sys.argv[1], read_only=True)
for name, (grid, spec) in meshes.items():
  sharding = NamedSharding(jax.sharding.Mesh(grid, ('fsdp', 'expert')), spec)
  like = {
    'w': jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding),
    'key': jax.eval_shape(lambda: jax.random.key(0)),
  }
  restored = manager.restore(like=like).state
  assert restored['w'].sharding == sharding, name
  np.testing.assert_array_equal(restored['w'], values)
  assert jax.random.bits(restored['key']) == jax.random.bits(jax.random.key(3))
one = manager.restore(like={
  'w': jax.ShapeDtypeStruct(values.shape, values.dtype), 'key': like['key']}).state
assert one['w'].devices() == {devices[0]}
np.testing.assert_array_equal(one['w'], values)
print('passed')
"""


def test_restores_on_other_meshes(tmp_path):
  """Saved on fsdp 4 × expert 2; read with the axes swapped, on 2 devices, and on 1."""
  child = subprocess.run(
    [sys.executable, '-c', SCRIPT, tmp_path],
    cwd=pathlib.Path(__file__).parents[2],
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert child.stdout.strip() == 'passed', child.stderr[-3000:]
