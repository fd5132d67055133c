"""Weights from a learner to the engines of other hosts: a directory of versions.

  learner: publisher = Publisher(directory, dtype=cfg.dtype)
           publisher.publish(variables, step, lineage)
  engine:  reader = Reader(directory)
           version = reader.wait(None, timeout_s=60)
           variables = reader.load(version, published.like(cfg, engine.sharding))

A version is stored as its difference to the one before (`delta`), and the first and
every n-th one also as a whole, by Orbax (`layout` has the files). It exists once it is
announced, so a reader never sees half of one, wherever a publisher is killed.

A reader that has the version before applies a difference; one that starts, or missed
too much, reads a whole version and the differences after it, whichever is less to read.
Where a file is damaged it takes another way to the same version, or reports
CorruptCheckpoint. Old versions are deleted; a reader that is overtaken by that gets
MissingCheckpoint, and takes a newer one.

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
