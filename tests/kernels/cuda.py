"""Lowering for CUDA on a machine that has no GPU."""

from __future__ import annotations

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

from m2jax import platforms

CALL = '__gpu$xla.gpu.triton'
MOSAIC_CALL = 'mosaic_gpu_v2'


def lowered(function, *shapes) -> str:
  """StableHLO of the jitted function, exported for an H100; its Triton kernels are
  valid, which nothing else checks before a GPU compiles them."""
  device = jax.sharding.AbstractDevice('NVIDIA H100', num_cores=132, platform='gpu')
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with (
    jax.sharding.use_abstract_mesh(mesh),
    platforms.any_platform(),
    pltpu.force_tpu_interpret_mode(None),  # kernels of GPUs too
  ):
    exported = jax.export.export(
      jax.jit(function),
      platforms=['cuda'],
      disabled_checks=[
        jax.export.DisabledSafetyCheck.custom_call(call) for call in (CALL, MOSAIC_CALL)
      ],
    )(*shapes)
  text = exported.mlir_module()
  _verify_triton(text)
  return text


def _verify_triton(text: str) -> None:
  """Raises ir.MLIRError for a Triton kernel that is not valid."""
  context = mlir.make_ir_context()
  triton.register_dialect(context)
  context.load_all_available_dialects()
  with context, ir.Location.unknown():
    calls = _operations(ir.Module.parse(text).operation, 'stablehlo.custom_call')
    for call in calls:
      if ir.StringAttr(call.attributes['call_target_name']).value == CALL:
        kernel = call.attributes['mhlo.backend_config']['ir']
        ir.Module.parse(ir.StringAttr(kernel).value_bytes).operation.verify()


def _operations(within, name: str):
  """All operations of that name, in any depth."""
  for block in (block for region in within.regions for block in region):
    for operation in (x.operation for x in block):
      if operation.name == name:
        yield operation
      yield from _operations(operation, name)
