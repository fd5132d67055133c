"""One process of several that load and save a Hugging Face directory on one mesh.

  python -m tests.checkpoint.huggingface_worker ID COUNT PORT SOURCE TARGET

Prints the bytes of tensors that a process read, of several on two meshes, and the
model's.
"""

import sys
from unittest import mock

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from m2jax import sharding
from m2jax.checkpoint import huggingface, leaves
from m2jax.checkpoint.huggingface import safetensors_io, streaming


def check_rows():
  """Any rows of any split, bit for bit: −0.0 and NaN, pieces that cross shards."""
  mesh = jax.make_mesh((2, 2, 2), ('a', 'b', 'c'))
  rng = np.random.default_rng(0)
  whole = rng.normal(size=(3, 4, 8, 6)).astype(np.float32)
  whole[:, :, 0, 0], whole[:, :, 1, 1] = -0.0, np.nan
  for spec in (P(None, 'a'), P(None, ('a', 'b'), 'c'), P(None, 'a', ('c', 'b'), None)):
    array = jax.device_put(whole, jax.sharding.NamedSharding(mesh, spec))
    for transposed in (False, True):
      for start, stop in ((0, 6), (1, 4)):
        index = (int(rng.integers(3)), int(rng.integers(4)))
        matrix = whole[index].T if transposed else whole[index]
        want = matrix[start:stop].astype(jax.numpy.bfloat16)
        have = streaming.rows(
          array, index, start, stop, transposed=transposed, dtype=want.dtype
        )
        assert have.tobytes() == want.tobytes(), (spec, transposed, start, stop)


def main():
  process, count, port = map(int, sys.argv[1:4])
  source, target = sys.argv[4:]
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8 // count)
  if count > 1:
    sharding.join(f'127.0.0.1:{port}', count, process)
  else:
    check_rows()
  # Process 0 gets the first experts, process 1 the others.
  grid = np.array(jax.devices()).reshape(2, 2, 2)  # expert, fsdp, tensor
  order = grid.transpose(1, 0, 2).reshape([1, 2, 1, 2, 2])
  rules = sharding.PRESETS['fsdp_ep']
  (_, whole), stored = counted(source)
  whole = leaves.table(jax.tree.map(np.asarray, whole))
  cfg, variables, read = load(source, order, rules, whole)
  huggingface.save(target, cfg, variables, max_shard_bytes=8_000)
  if count == 1:
    print('read', read, 'and', read, 'of', stored)
    return
  # Each process gets a half of the columns of nearly every matrix.
  columns = np.array(jax.devices()).reshape([1, 4, 2, 1, 1])
  halves = load(source, columns, sharding.PRESETS['fsdp'], whole)[2]
  print('read', read, 'and', halves, 'of', stored)


def load(source, devices, rules, whole):
  """Loads onto a mesh and compares; also returns the bytes of tensors that it read."""
  mesh = jax.sharding.Mesh(devices, sharding.MESH_AXES)
  (cfg, variables), read = counted(source, mesh=mesh, rules=rules)
  specs = leaves.table(sharding.param_specs(cfg, rules))
  for name, leaf in leaves.table(variables).items():
    assert leaf.sharding == jax.sharding.NamedSharding(mesh, specs[name]), name
    for shard in leaf.addressable_shards:
      np.testing.assert_array_equal(shard.data, whole[name][shard.index])
  return cfg, variables, read


def counted(source, **options):
  """What `huggingface.load` returns, and the bytes of tensors that it read."""
  sizes, rows = [], safetensors_io.Reader.rows

  def counting(*args):
    out = rows(*args)
    sizes.append(out.nbytes)
    return out

  with mock.patch.object(safetensors_io.Reader, 'rows', counting):
    return huggingface.load(source, **options), sum(sizes)


if __name__ == '__main__':
  main()
