"""NVIDIA H100 and H200: 989 TFLOP/s in bf16, 3350 and 4800 GB/s.

Chosen by the capacity of shared memory and registers; not timed on a device.
"""

SIZES = {
  'tree_attention': {
    'tokens': 64,  # of a query or key block; a power of two
    'warps': 4,
    'stages': 2,
  },
  'grouped_matmul': {
    'rows': 64,  # of a tile; powers of two
    'columns': 128,
    'inner': 64,
    'warps': 4,
    'stages': 3,
  },
  'paged_attention': {
    'queries': 64,  # of a block, times query heads of a group, at most
    'programs': 264,  # at most by dividing rows' pages: two a multiprocessor
    'warps': 4,
    'stages': 2,
    'keys': 64,  # of a step of the Mosaic GPU kernel, at least a page
    'slots': 3,  # of its ring of steps
  },
  'qk_norm_rope': {'tokens': 16, 'warps': 8},  # rows of a program of the backward pass
}
