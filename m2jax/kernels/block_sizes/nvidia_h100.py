"""NVIDIA H100 and H200: 989 TFLOP/s in bf16, 3350 and 4800 GB/s.

Chosen with `python -m benchmarks.kernels --tune=…` on an H100 80GB HBM3, jax 0.11.2;
those of `paged_attention_triton` and `qk_norm_rope` follow from the capacity of shared
memory and registers.
"""

SIZES = {
  'tree_attention': {
    'tokens': 128,  # of a program's block of queries; powers of two
    'partner_tokens': 128,  # of the blocks of keys that it loops over
    'warps': 8,
    'stages': 2,
  },
  # d_q: as above; d_k and d_v: a program's block is of keys
  'tree_attention_backward': {
    'tokens': 64,
    'partner_tokens': 64,
    'warps': 4,
    'stages': 2,
  },
  'grouped_matmul': {
    'rows': 128,  # of a tile; powers of two
    'columns': 128,
    'inner': 64,
    'warps': 8,
    'stages': 3,
  },
  'paged_attention': {
    'programs': 264,  # at most by dividing rows' pages: two a multiprocessor
    'keys': 128,  # of a step, at least a page
    'slots': 2,  # of the ring of steps
  },
  'paged_attention_triton': {
    'queries': 64,  # of a block, times query heads of a group, at most
    'programs': 264,
    'warps': 4,
    'stages': 2,
  },
  'qk_norm_rope': {'tokens': 16, 'warps': 8},  # rows of a program of the backward pass
}
