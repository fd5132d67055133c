"""Cuts a tree of any size into chunks that are trained in sequence.

Tokens with more than C tokens in their subtree (themselves included) form the *trunk*,
which is closed under parents. The subtrees attached to it have at most C tokens: the
*pieces*. The plan traverses the trunk depth first. The device stores one root path at a
time, the *stack*, with slot = position:

  push  a segment of the path: its keys, values and states are put on the stack;
  leaf  a chunk of pieces that are attached to the current path: forward and backward;
  pop   a segment of the path, after everything attached to it: forward again, and
        backward with the cotangents of its descendants from the stack.

Pieces attached to different points of a path share a chunk, deeper ones first: stack
slot j is then visible to the chunk's tokens up to some index, an interval as in any
forest. Each token is trained once, in a leaf or a pop; trunk tokens cost one additional
forward pass. Push and pop over K/V stacks are from AReaL-DTA (facts/rl-systems.md
§3.2).

Axes: N tokens of the tree, C of a chunk, P of the stack, M loss terms, L layers.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from m2jax.forest import buckets as buckets_lib
from m2jax.forest.types import FIELDS, TOKEN_FIELDS, Forest, padding


@dataclasses.dataclass(frozen=True)
class Buckets:
  """Shapes that chunks are padded to.

  Attributes:
    chunk_tokens: C, ascending; the last is the maximum size of a chunk.
    stack_tokens: P, ascending; the last is the size of the stack: no path to a piece
      may be longer. Pieces without a parent have P = 0.
    terms_per_token: a chunk of C tokens is padded to C times this many loss terms, or
      to the next doubling of that if it has more.
  """

  chunk_tokens: tuple[int, ...]
  stack_tokens: tuple[int, ...]
  terms_per_token: int = 1

  def __post_init__(self):
    for name in ('chunk_tokens', 'stack_tokens'):
      values = getattr(self, name)
      if not values or list(values) != sorted(set(values)) or values[0] < 1:
        raise ValueError(
          f'Buckets.{name}={values}: must be ascending sizes of at least 1'
        )
    if self.terms_per_token < 1:
      raise ValueError(
        f'Buckets.terms_per_token={self.terms_per_token}: must be at least 1'
      )

  def max_programs(self, max_terms: int = 1) -> int:
    """Maximum number of shapes of the three kinds of chunks together.

    Args:
      max_terms: maximum loss terms of a chunk.
    """
    stacks = len(self.stack_tokens)
    shapes = 0  # pairs of chunk size and number of terms
    for size in self.chunk_tokens:
      terms = size * self.terms_per_token
      shapes += 1 + max(0, math.ceil(math.log2(max_terms / terms)))
    return stacks * len(self.chunk_tokens) + (2 * stacks + 1) * shapes


@dataclasses.dataclass(frozen=True)
class Chunk:
  """One pass over some tokens below a path.

  Attributes:
    kind: 'push', 'leaf' or 'pop'.
    batch: Forest of [1, C]. Indices in `parent` and `subtree_end` start with the P
      slots of the stack, so that `subtree_end` is [1, P + C]. A push has no terms.
    start: for push and pop, the position of the first token, which is its slot.
    ids: indices in the tree of its tokens, without padding.
  """

  kind: str
  batch: Forest
  start: int
  ids: np.ndarray

  @property
  def length(self) -> int:
    """Number of tokens without padding."""
    return len(self.ids)

  @property
  def shape(self) -> tuple[str, int, int, int]:
    """(kind, C, P, M), which a program is compiled for."""
    tokens = self.batch.tokens.shape[1]
    stack = self.batch.subtree_end.shape[1] - tokens
    return self.kind, tokens, stack, self.batch.weight.shape[1]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The order in which a tree is trained; iterating gives its chunks.

  Attributes:
    tree: the forest of one row that was cut.
    buckets: the shapes.
    tokens: N.
    trunk_tokens: tokens that are pushed and popped, with an additional forward pass.
    longest_path: maximum tokens on the stack.
  """

  tree: Forest
  buckets: Buckets
  tokens: int
  trunk_tokens: int
  longest_path: int
  _steps: tuple[tuple, ...] = dataclasses.field(repr=False)

  def __len__(self) -> int:
    return len(self._steps)

  @property
  def cost_tokens(self) -> float:
    """Cost in tokens of one forward and backward pass each, padding included.

    A push, a forward pass alone, is a third of that.
    """
    total = 0.0
    for kind, *where in self._steps:
      tokens = len(where[-1])
      if kind == 'leaf':
        tokens = sum(end - first for first, end, _ in where[0])
      run = buckets_lib.fit(tokens, self.buckets.chunk_tokens, 'chunk_tokens')
      total += run / 3 if kind == 'push' else run
    return total

  def __iter__(self) -> Iterator[Chunk]:
    build = _Builder(self.tree, self.buckets)
    for kind, *where in self._steps:
      yield build.leaf(*where) if kind == 'leaf' else build.run(kind, *where)


def cut(tree: Forest, buckets: Buckets) -> Plan:
  """Plans the chunks of a forest of one row, as from `merge(samples)`.

  Host time and memory are linear in the tree; the arrays of a chunk are created during
  iteration of the plan.

  Raises:
    ValueError: more than one row, or a path longer than the stack.
  """
  if len(tree.tokens) != 1:
    raise ValueError(
      f'cut: the forest has {len(tree.tokens)} rows, not 1: use merge(samples)'
    )
  size, n = buckets.chunk_tokens[-1], tree.num_tokens
  parent, end = tree.parent[0, :n], tree.subtree_end[0, :n]
  trunk = end - np.arange(n) > size
  attached = (parent < 0) | trunk[np.maximum(parent, 0)]
  pieces = _by_parent(np.flatnonzero(~trunk & attached), parent, end)
  children = np.bincount(parent[trunk & (parent >= 0)], minlength=n)
  is_branch = trunk & (children != 1)
  is_branch[[at for at in pieces if at >= 0]] = True
  branches = np.flatnonzero(is_branch).tolist()
  up = _branches_above(branches, end)
  steps = _walk(tree, buckets, branches, up, _bins(pieces, branches, up, size))
  tops = (step[1] + len(step[2]) for step in steps if step[0] == 'push')
  longest = max(tops, default=0)
  buckets_lib.fit(longest, buckets.stack_tokens, 'cut: stack_tokens: a path')
  return Plan(tree, buckets, n, int(trunk.sum()), longest, tuple(steps))


def _by_parent(roots, parent, end) -> dict[int, list[tuple[int, int]]]:
  """(size, root) of the pieces by the trunk token they are attached to; -1 if none."""
  pieces = collections.defaultdict(list)
  columns = (parent[roots], end[roots] - roots, roots)
  for at, size, root in zip(*(c.tolist() for c in columns), strict=True):
    pieces[at].append((size, root))
  return pieces


def _branches_above(branches, end) -> dict[int, int]:
  """The nearest branch point above each branch point, -1 if there is none."""
  up: dict[int, int] = {}
  path: list[int] = []
  for branch in branches:
    while path and end[path[-1]] <= branch:
      path.pop()
    up[branch] = path[-1] if path else -1
    path.append(branch)
  return up


def _bins(pieces, branches, up, size) -> dict[int, list[list[tuple[int, int]]]]:
  """Packs pieces into chunks of at most `size` tokens, by deepest branch point.

  Works from the bottom up: a chunk with free tokens takes pieces that are attached to
  the path above it, larger ones first, each into the fullest chunk that it fits.
  """
  found = collections.defaultdict(list)
  # by branch point, chunks started below it that are not full: (free, serial, pieces)
  not_full: dict[int, list] = collections.defaultdict(list)
  serial = 0
  for branch in [*reversed(branches), -1]:
    open_chunks = sorted(not_full.pop(branch, []))
    for piece in sorted(pieces.get(branch, []), reverse=True):
      at = bisect.bisect_left(open_chunks, (piece[0],))
      if at < len(open_chunks):
        free, number, chunk = open_chunks.pop(at)
      else:
        free, number, chunk = size, serial, []
        serial += 1
        found[branch].append(chunk)
      chunk.append((piece[1], piece[1] + piece[0], branch))
      if free > piece[0]:
        bisect.insort(open_chunks, (free - piece[0], number, chunk))
    if branch >= 0:
      not_full[up[branch]] += open_chunks
  return found


def _walk(tree, buckets, branches, up, bins) -> list[tuple]:
  """Steps in order: ('push' | 'pop', start, token ids) and ('leaf', pieces)."""
  position, end = tree.position[0], tree.subtree_end[0]
  size = buckets.chunk_tokens[-1]
  inner = set(up.values())
  bottoms = [b for b in branches if b not in inner]
  due: dict[int, list] = collections.defaultdict(
    list
  )  # chunks by the first bottom below their path
  for branch, chunks in bins.items():
    below = bottoms[bisect.bisect_left(bottoms, branch)] if branch >= 0 else -1
    due[below] += chunks
  path = np.zeros(1 + max((int(position[b]) for b in bottoms), default=-1), np.int64)
  steps: list[tuple] = [('leaf', chunk) for chunk in due[-1]]
  depth = 0

  def pop(to):
    nonlocal depth
    while depth > to:
      start = max(to, depth - size)
      steps.append(('pop', start, path[start:depth].copy()))
      depth = start

  for bottom in bottoms:
    branch, above = bottom, up[bottom]
    shared = 0
    if depth:
      before = path[depth - 1]
      while above >= 0 and not above <= before < end[above]:
        above = up[above]
      shared = int(position[above]) + 1 if above >= 0 else 0
      pop(shared)
    # Token ids between two branch points are consecutive.
    while branch >= 0 and position[branch] >= shared:
      first = max(shared, int(position[up[branch]]) + 1 if up[branch] >= 0 else 0)
      stop = int(position[branch]) + 1
      path[first:stop] = np.arange(branch + 1 - (stop - first), branch + 1)
      branch = up[branch]
    target = int(position[bottom]) + 1
    while depth < target:
      stop = min(depth + size, target)
      steps.append(('push', depth, path[depth:stop].copy()))
      depth = stop
    steps += [('leaf', chunk) for chunk in due[bottom]]
  pop(0)
  return steps


class _Builder:
  """Builds the arrays of a chunk from those of its tree."""

  def __init__(self, tree: Forest, buckets: Buckets):
    self._buckets = buckets
    self._tree = tree
    live = np.flatnonzero(tree.weight[0])
    self._terms = live[np.argsort(tree.term_token[0, live], kind='stable')]
    self._term_token = tree.term_token[0, self._terms]
    counts = np.bincount(self._term_token, minlength=tree.tokens.shape[1])
    self._terms_before = np.concatenate([[0], np.cumsum(counts)])  # by token

  def leaf(self, pieces) -> Chunk:
    """A chunk of pieces (first, end, branch point or -1), deeper ones first."""
    position = self._tree.position[0]
    depth = np.array([-1 if b < 0 else int(position[b]) for _, _, b in pieces])
    order = np.lexsort(([p[0] for p in pieces], -depth))
    depth, pieces = depth[order], [pieces[i] for i in order]
    runs = [piece[:2] for piece in pieces]
    batch, stack, ids = self._batch('leaf', runs, int(depth[0]) + 1)
    stops = np.cumsum([stop - start for start, stop in runs])
    # Slot j is visible to the pieces attached to it or deeper, the first of the chunk.
    seen = np.searchsorted(-depth, -np.arange(stack), side='right')
    seen = np.concatenate([[0], stops])[seen]
    batch.subtree_end[0, :stack] = np.where(seen > 0, stack + seen, 0)
    for (first, end), at, stop in zip(runs, depth, stops, strict=True):
      to = slice(stop - (end - first), stop)
      shift = stack + to.start - first
      batch.parent[0, to] = self._tree.parent[0, first:end] + shift
      batch.parent[0, to.start] = at
      ends = self._tree.subtree_end[0, first:end] + shift
      batch.subtree_end[0, stack + to.start : stack + stop] = ends
    return Chunk('leaf', batch, 0, ids)

  def run(self, kind: str, start: int, ids: np.ndarray) -> Chunk:
    """A segment of the path, from slot `start`."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    parts = np.split(ids, cuts)
    runs = [(int(part[0]), int(part[-1]) + 1) for part in parts]
    batch, stack, ids = self._batch(kind, runs, start)
    length = len(ids)
    batch.parent[0, :length] = stack + np.arange(length) - 1
    batch.parent[0, 0] = start - 1
    batch.subtree_end[0, :start] = stack + length
    batch.subtree_end[0, stack : stack + length] = stack + length
    return Chunk(kind, batch, start, ids)

  def _batch(self, kind, runs, depth):
    """A chunk's arrays except parents and ends; P; its tokens in the tree."""
    tree, buckets = self._tree, self._buckets
    ids = np.concatenate([np.arange(*run) for run in runs])
    size = buckets_lib.fit(len(ids), buckets.chunk_tokens, 'chunk_tokens')
    stacks = (0,) * (kind == 'leaf') + buckets.stack_tokens
    stack = buckets_lib.fit(depth, stacks, 'stack_tokens')
    slots, tokens = self._terms_of(runs) if kind != 'push' else (ids[:0], ids[:0])
    most = 1 if kind == 'push' else size * buckets.terms_per_token
    while most < len(slots):
      most *= 2
    out = padding(1, size, most)
    out = dataclasses.replace(out, subtree_end=np.zeros((1, stack + size), np.int32))
    out.term_token[0, : len(slots)] = tokens
    copied = {}
    for name in FIELDS.keys() - {'parent', 'subtree_end', 'term_token'}:
      if (values := getattr(tree, name)) is not None:
        of, columns = (ids, size) if name in TOKEN_FIELDS else (slots, most)
        shape = 1, columns, *values.shape[2:]
        copied[name] = np.full(shape, FIELDS[name]['fill'], values.dtype)
        copied[name][0, : len(of)] = values[0, of]
    return dataclasses.replace(out, **copied), stack, ids

  def _terms_of(self, runs):
    """Terms of the tokens in `runs`: slots in the tree, indices of their tokens."""
    slots, tokens, offset = [], [], 0
    for start, stop in runs:
      low, high = self._terms_before[start], self._terms_before[stop]
      slots.append(self._terms[low:high])
      tokens.append(self._term_token[low:high] - start + offset)
      offset += stop - start
    return np.concatenate(slots), np.concatenate(tokens)
