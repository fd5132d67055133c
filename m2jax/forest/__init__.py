"""Forest, the only batch layout: tokens of prefix trees in depth-first order.

Laws 1–3 of the design; why merging is exact: facts/algorithms.md §6.

  batch = forest.merge(samples, row_tokens=4096)     # rows of merged prefix trees
  forest.by_bucket(batch, forest.sizes(512, 4096))   # the same rows in few shapes
  tree = forest.merge(samples)                       # one row of any length
  forest.cut(tree, buckets)                          # chunks for `train.chunks`
"""

from m2jax.forest.buckets import by_bucket, sizes
from m2jax.forest.cutting import Buckets, Chunk, Plan, cut
from m2jax.forest.merging import LOSSES, Size, chain, measure, merge
from m2jax.forest.replay import Disagreement, disagreement
from m2jax.forest.types import (
  OLDER_KEYS,
  TEACHER_TOKENS,
  TERM_FIELDS,
  TOKEN_FIELDS,
  Forest,
  Sample,
  causal,
  select,
)

__all__ = (
  'LOSSES',
  'OLDER_KEYS',
  'TEACHER_TOKENS',
  'TERM_FIELDS',
  'TOKEN_FIELDS',
  'Buckets',
  'Chunk',
  'Disagreement',
  'Forest',
  'Plan',
  'Sample',
  'Size',
  'by_bucket',
  'causal',
  'chain',
  'cut',
  'disagreement',
  'measure',
  'merge',
  'select',
  'sizes',
)
