"""Lowering for CUDA on a machine that has no GPU."""

from __future__ import annotations

import jax

CALL = '__gpu$xla.gpu.triton'
MOSAIC_CALL = 'mosaic_gpu_v2'


def lowered(function, *shapes) -> str:
  """StableHLO of the jitted function, exported for an H100."""
  device = jax.sharding.AbstractDevice('NVIDIA H100', num_cores=132, platform='gpu')
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    exported = jax.export.export(
      jax.jit(function),
      platforms=['cuda'],
      disabled_checks=[
        jax.export.DisabledSafetyCheck.custom_call(call) for call in (CALL, MOSAIC_CALL)
      ],
    )(*shapes)
  return exported.mlir_module()
