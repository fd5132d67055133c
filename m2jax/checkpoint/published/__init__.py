"""Weights from a learner to the engines of other hosts: a directory of versions.

  learner: publisher = Publisher(directory, dtype=cfg.dtype)
           publisher.publish(variables, step, lineage)
  engine:  reader = Reader(directory)
           version = reader.wait(None, timeout_s=60)
           variables = reader.load(version, published.like(cfg, engine.sharding))

A version is stored as a delta from the previous one (`delta`), and the first and every
n-th one also in full, by Orbax (`layout` has the files). It exists once it is
announced, so a reader never sees a partial one, whenever a publisher is killed.

A reader with the previous version applies a delta; one that starts, or missed too much,
reads a full version and the deltas after it, whichever is less to read. If a file is
damaged it takes another way to the same version, or raises CorruptCheckpoint. Old
versions are deleted; a reader that falls behind gets MissingCheckpoint, and takes a
newer one.

With a mesh of several processes each writes, and reads, its own shards.
"""

from m2jax.checkpoint.published.dtypes import cast, dtype_of, like
from m2jax.checkpoint.published.layout import Version
from m2jax.checkpoint.published.publisher import Published, Publisher
from m2jax.checkpoint.published.reader import Reader

__all__ = [
  'Published',
  'Publisher',
  'Reader',
  'Version',
  'cast',
  'dtype_of',
  'like',
]
