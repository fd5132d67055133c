"""Saves on a mesh of 8 virtual CPU devices, restores on others; prints 'passed'.

python -m tests.checkpoint.mesh_worker DIRECTORY
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from m2jax.checkpoint import CheckpointManager


def main(directory):
  jax.config.update('jax_num_cpu_devices', 8)
  devices = np.array(jax.devices())
  save_mesh = jax.sharding.Mesh(devices.reshape(4, 2), ('fsdp', 'expert'))
  values = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

  def placed(mesh, spec):
    return jax.device_put(values, NamedSharding(mesh, spec))

  with CheckpointManager(directory) as manager:
    state = {
      'w': placed(save_mesh, P('fsdp', 'expert')),
      'key': jax.device_put(jax.random.key(3), NamedSharding(save_mesh, P())),
    }
    manager.save(1, state)

  meshes = {
    'other axes': (devices.reshape(2, 4), P('expert', 'fsdp')),
    'fewer devices': (devices[:2].reshape(2, 1), P(None, 'fsdp')),
  }
  manager = CheckpointManager(directory, read_only=True)
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
  one = manager.restore(
    like={'w': jax.ShapeDtypeStruct(values.shape, values.dtype), 'key': like['key']}
  ).state
  assert one['w'].devices() == {devices[0]}
  np.testing.assert_array_equal(one['w'], values)
  print('passed')


if __name__ == '__main__':
  main(sys.argv[1])
