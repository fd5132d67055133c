"""Law 6: a checkpoint resumes on another mesh. In its own process: 8 CPU devices."""

from tests import processes


def test_restores_on_other_meshes(tmp_path):
  """Saved on fsdp 4 × expert 2; read with the axes swapped, on 2 devices, and on 1."""
  child = processes.run('tests.checkpoint.mesh_worker', tmp_path)
  assert child.stdout.strip() == 'passed', child.stderr[-3000:]
