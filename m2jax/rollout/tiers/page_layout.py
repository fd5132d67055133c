"""Pages of the cache as host arrays: single pages, or the blocks that the engine moves.

A page is a tuple of arrays, one for each array of `pages.Pages` in the order of its
leaves, without the axis of the pages. The arrays' content does not matter here.

Axes: n pages of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from m2jax.rollout.engine import pages as pages_lib

Page = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
  """Shapes and dtypes of a page's arrays.

  Attributes:
    axes: axis of the pages in each array of a block.
    structure: tree structure of a block, a `pages.Pages`.
  """

  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[np.dtype, ...]
  axes: tuple[int, ...]
  structure: jax.tree_util.PyTreeDef

  @classmethod
  def of(cls, pages: pages_lib.Pages) -> Layout:
    """The layout of the engine's pages, or of their shapes."""
    leaves, structure = jax.tree.flatten(pages)
    axes = tuple(jax.tree.leaves(pages_lib.axes(pages)))
    shapes = tuple(
      leaf.shape[:axis] + leaf.shape[axis + 1 :]
      for leaf, axis in zip(leaves, axes, strict=True)
    )
    return cls(shapes, tuple(np.dtype(x.dtype) for x in leaves), axes, structure)

  @property
  def page_bytes(self) -> int:
    sizes = (np.prod(shape, dtype=int) for shape in self.shapes)
    return int(sum(n * d.itemsize for n, d in zip(sizes, self.dtypes, strict=True)))

  def describe(self) -> str:
    """A text that differs between layouts."""
    return repr([(s, d.name) for s, d in zip(self.shapes, self.dtypes, strict=True)])

  def split(self, block: pages_lib.Pages, count: int) -> list[Page]:
    """The first pages of a block of host arrays, as copies."""
    leaves = jax.tree.leaves(block)
    one = lambda i: tuple(
      np.array(leaf[(slice(None),) * axis + (i,)], order='C')
      for leaf, axis in zip(leaves, self.axes, strict=True)
    )
    return [one(i) for i in range(count)]

  def join(self, pages: Sequence[Page], n: int) -> pages_lib.Pages:
    """A block of n pages: those given, then zeros."""
    leaves = []
    for i, axis in enumerate(self.axes):
      shape = self.shapes[i]
      block = np.zeros((*shape[:axis], n, *shape[axis:]), self.dtypes[i])
      moved = np.moveaxis(block, axis, 0)
      for at, page in enumerate(pages):
        moved[at] = page[i]
      leaves.append(block)
    return jax.tree.unflatten(self.structure, leaves)

  def finite(self, page: Page) -> bool:
    """Whether no number of a page is NaN or infinite."""
    floats = (x for x in page if not np.issubdtype(x.dtype, np.integer))
    return all(np.isfinite(x).all() for x in floats)
