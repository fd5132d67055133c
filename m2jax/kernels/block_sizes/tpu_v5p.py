"""TPU v5p (figures of the chip: `m2jax/plan/chips.py`).

Chosen by ahead-of-time compilation so that the kernels fit VMEM at M2's shapes; not
timed on a device. Sizes are for bf16; those marked * are halved for fp32.
"""

SIZES = {
  'tree_attention': {
    'tokens': 512,  # of a query or key block, at most
    'group_tokens': 4096,  # * of a query block times query heads of a group, at most
  },
  'grouped_matmul': {
    'rows': 512,  # * of a tile of rows, at most
    'chunk': 128,  # of rows in one product: a tile's chunks without a row are skipped
    'columns': 768,  # of a tile of a matrix, at most
    'inner': 3072,  # * of a tile's contracted side, at most
    'd_rhs_columns': 1024,  # * of either side of a tile of a matrix's gradient
    'vmem_bytes': 32 << 20,
  },
  'qk_norm_rope': {
    'tokens': 128,  # of a block: a multiple of 128
    'vmem_bytes': 32 << 20,
  },
  'paged_attention': {
    'tokens': 512,  # of a block of pages
    'queries': 512,  # * of a block, times query heads of a group, at most
    'vmem_bytes': 32 << 20,
  },
}
