"""Cuts a tree of any size into chunks that are trained one after the other.

A token with more than C tokens in its subtree (itself included) lies on the *core*,
which is closed under parents. What hangs off the core are whole subtrees of at most C
tokens: the *pieces*. The plan walks the core depth first. One root path at a time, the
*stack*, is on the device, slot = position:

  push  a run of the path: its keys, values and states go onto the stack;
  leaf  a chunk of pieces, all hanging off the path at hand, forward and backward;
  pop   a run of the path, once all that hangs off it is done: forward again, and
        backward with the cotangents that its descendants left on the stack.

Pieces that hang off different points of one path share a chunk, deeper ones first: then
stack slot j is seen by the chunk's tokens up to some index, an interval as in any
forest. Each token is trained once, in a leaf or a pop; core tokens cost one forward
more. Push/visit/pop over K/V stacks is AReaL-DTA's idea (facts/rl-systems.md §3.2).

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
    chunk_tokens: C, ascending; the largest is what a chunk holds at most.
    stack_tokens: P, ascending; the largest is the stack's size: no path to a piece may
      be longer. Pieces that hang off nothing have P = 0.
    terms_per_token: a chunk of C has room for C times this many loss terms; a chunk
      with more gets twice the room, and so on.
  """

  chunk_tokens: tuple[int, ...]
  stack_tokens: tuple[int, ...]
  terms_per_token: int = 1

  def __post_init__(self):
    for name in ('chunk_tokens', 'stack_tokens'):
      values = getattr(self, name)
      if not values or list(values) != sorted(set(values)) or values[0] < 1:
        raise ValueError(f'Buckets.{name}={values}: want ascending sizes of at least 1')
    if self.terms_per_token < 1:
      raise ValueError(f'Buckets.terms_per_token={self.terms_per_token}: at least 1')

  def most_programs(self, most_terms: int = 1) -> int:
    """How many shapes the three kinds of chunks can have together.

    Args:
      most_terms: loss terms of one chunk at most.
    """
    stacks = len(self.stack_tokens)
    rooms = 0  # for terms, over the sizes of a chunk
    for size in self.chunk_tokens:
      room = size * self.terms_per_token
      rooms += 1 + max(0, math.ceil(math.log2(most_terms / room)))
    return stacks * len(self.chunk_tokens) + (2 * stacks + 1) * rooms


@dataclasses.dataclass(frozen=True)
class Chunk:
  """One pass over some tokens below a path.

  Attributes:
    kind: 'push', 'leaf' or 'pop'.
    batch: Forest of [1, C]. Indices in `parent` and `subtree_end` count the P slots of
      the stack first, so `subtree_end` is [1, P + C]. A push has no terms.
    start: push, pop: position of the first token, which is its slot.
    length: tokens that are not padding.
  """

  kind: str
  batch: Forest
  start: int
  length: int

  @property
  def shape(self) -> tuple[str, int, int, int]:
    """kind, C, P, M: what a program is compiled for."""
    tokens = self.batch.tokens.shape[1]
    stack = self.batch.subtree_end.shape[1] - tokens
    return self.kind, tokens, stack, self.batch.weight.shape[1]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The order in which a tree is trained; iterate for its chunks.

  Attributes:
    tree: the forest of one row that was cut.
    buckets: the shapes.
    tokens: N.
    core_tokens: those that are pushed and popped: one forward pass more.
    longest_path: tokens on the stack at most.
  """

  tree: Forest
  buckets: Buckets
  tokens: int
  core_tokens: int
  longest_path: int
  _visits: tuple[tuple, ...] = dataclasses.field(repr=False)

  def __len__(self) -> int:
    return len(self._visits)

  def __iter__(self) -> Iterator[Chunk]:
    build = _Builder(self.tree, self.buckets)
    for kind, *where in self._visits:
      yield build.leaf(*where) if kind == 'leaf' else build.run(kind, *where)


def cut(tree: Forest, buckets: Buckets) -> Plan:
  """Plans the chunks of a forest of one row, as `merge(samples)` makes it.

  Host time and memory are linear in the tree; arrays of a chunk are made when the plan
  is iterated.

  Raises:
    ValueError: more than one row, or a path longer than the stack.
  """
  if len(tree.tokens) != 1:
    raise ValueError(f'cut: want one row, not {len(tree.tokens)}: merge(samples)')
  size, n = buckets.chunk_tokens[-1], tree.num_tokens
  parent, end = tree.parent[0, :n], tree.subtree_end[0, :n]
  core = end - np.arange(n) > size
  below_core = (parent < 0) | core[np.maximum(parent, 0)]
  pieces = _attached(np.flatnonzero(~core & below_core), parent, end)
  children = np.bincount(parent[core & (parent >= 0)], minlength=n)
  is_knot = core & (children != 1)
  is_knot[[at for at in pieces if at >= 0]] = True
  knots = np.flatnonzero(is_knot).tolist()
  up = _knots_above(knots, end)
  visits = _walk(tree, buckets, knots, up, _bins(pieces, knots, up, size))
  tops = (visit[1] + len(visit[2]) for visit in visits if visit[0] == 'push')
  longest = max(tops, default=0)
  buckets_lib.fit(longest, buckets.stack_tokens, 'cut: stack_tokens: a path')
  return Plan(tree, buckets, n, int(core.sum()), longest, tuple(visits))


def _attached(roots, parent, end) -> dict[int, list[tuple[int, int]]]:
  """(size, root) of the pieces by the core token that they hang off; -1 is none."""
  pieces = collections.defaultdict(list)
  columns = (parent[roots], end[roots] - roots, roots)
  for at, size, root in zip(*(c.tolist() for c in columns), strict=True):
    pieces[at].append((size, root))
  return pieces


def _knots_above(knots, end) -> dict[int, int]:
  """The next knot above each, -1 where there is none."""
  up, path = {}, []
  for knot in knots:
    while path and end[path[-1]] <= knot:
      path.pop()
    up[knot] = path[-1] if path else -1
    path.append(knot)
  return up


def _bins(pieces, knots, up, size) -> dict[int, list[list[tuple[int, int]]]]:
  """Pieces in chunks of at most `size` tokens, by the deepest knot of each chunk.

  From the bottom up: a chunk that still has room takes what hangs off the path above
  it, the larger pieces first and each into the fullest chunk that holds it.
  """
  found = collections.defaultdict(list)
  # by knot, chunks begun below it that have room: (room, serial, pieces)
  having_room = collections.defaultdict(list)
  serial = 0
  for knot in [*reversed(knots), -1]:
    rooms = sorted(having_room.pop(knot, []))
    for piece in sorted(pieces.get(knot, []), reverse=True):
      at = bisect.bisect_left(rooms, (piece[0],))
      if at < len(rooms):
        room, number, chunk = rooms.pop(at)
      else:
        room, number, chunk = size, serial, []
        serial += 1
        found[knot].append(chunk)
      chunk.append((piece[1], piece[1] + piece[0], knot))
      if room > piece[0]:
        bisect.insort(rooms, (room - piece[0], number, chunk))
    if knot >= 0:
      having_room[up[knot]] += rooms
  return found


def _walk(tree, buckets, knots, up, bins) -> list[tuple]:
  """Visits in order: ('push' | 'pop', start, token ids) and ('leaf', pieces)."""
  position, end = tree.position[0], tree.subtree_end[0]
  size = buckets.chunk_tokens[-1]
  inner = set(up.values())
  bottoms = [k for k in knots if k not in inner]
  due = collections.defaultdict(list)  # chunks by the first bottom below their path
  for knot, chunks in bins.items():
    below = bottoms[bisect.bisect_left(bottoms, knot)] if knot >= 0 else -1
    due[below] += chunks
  path = np.zeros(1 + max((int(position[b]) for b in bottoms), default=-1), np.int64)
  visits, depth = [('leaf', chunk) for chunk in due[-1]], 0

  def pop(to):
    nonlocal depth
    while depth > to:
      start = max(to, depth - size)
      visits.append(('pop', start, path[start:depth].copy()))
      depth = start

  for bottom in bottoms:
    knot, above = bottom, up[bottom]
    shared = 0
    if depth:
      before = path[depth - 1]
      while above >= 0 and not above <= before < end[above]:
        above = up[above]
      shared = int(position[above]) + 1 if above >= 0 else 0
      pop(shared)
    # between two knots ids are consecutive
    while knot >= 0 and position[knot] >= shared:
      first = max(shared, int(position[up[knot]]) + 1 if up[knot] >= 0 else 0)
      stop = int(position[knot]) + 1
      path[first:stop] = np.arange(knot + 1 - (stop - first), knot + 1)
      knot = up[knot]
    target = int(position[bottom]) + 1
    while depth < target:
      stop = min(depth + size, target)
      visits.append(('push', depth, path[depth:stop].copy()))
      depth = stop
    visits += [('leaf', chunk) for chunk in due[bottom]]
  pop(0)
  return visits


class _Builder:
  """Makes the arrays of a chunk from those of its tree."""

  def __init__(self, tree: Forest, buckets: Buckets):
    self._buckets = buckets
    self._tree = tree
    live = np.flatnonzero(tree.weight[0])
    self._terms = live[np.argsort(tree.term_token[0, live], kind='stable')]
    self._term_token = tree.term_token[0, self._terms]
    counts = np.bincount(self._term_token, minlength=tree.tokens.shape[1])
    self._terms_before = np.concatenate([[0], np.cumsum(counts)])  # each token

  def leaf(self, pieces) -> Chunk:
    """Pieces (first, end, knot above or -1), deeper knots first."""
    position = self._tree.position[0]
    depth = np.array([-1 if k < 0 else int(position[k]) for _, _, k in pieces])
    order = np.lexsort(([p[0] for p in pieces], -depth))
    depth, pieces = depth[order], [pieces[i] for i in order]
    runs = [piece[:2] for piece in pieces]
    batch, stack, length = self._batch('leaf', runs, int(depth[0]) + 1)
    stops = np.cumsum([stop - start for start, stop in runs])
    # slot j is seen by the pieces that hang off it or deeper, the first of the chunk
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
    return Chunk('leaf', batch, 0, length)

  def run(self, kind: str, start: int, ids: np.ndarray) -> Chunk:
    """A run of the path, from slot `start`."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    parts = np.split(ids, cuts)
    runs = [(int(part[0]), int(part[-1]) + 1) for part in parts]
    batch, stack, length = self._batch(kind, runs, start)
    batch.parent[0, :length] = stack + np.arange(length) - 1
    batch.parent[0, 0] = start - 1
    batch.subtree_end[0, :start] = stack + length
    batch.subtree_end[0, stack : stack + length] = stack + length
    return Chunk(kind, batch, start, length)

  def _batch(self, kind, runs, depth):
    """A chunk's arrays but for parents and ends, stack tokens P, and its tokens."""
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
    return dataclasses.replace(out, **copied), stack, len(ids)

  def _terms_of(self, runs):
    """Terms of the tokens in `runs`: their slots in the tree, their tokens' indices."""
    slots, tokens, offset = [], [], 0
    for start, stop in runs:
      low, high = self._terms_before[start], self._terms_before[stop]
      slots.append(self._terms[low:high])
      tokens.append(self._term_token[low:high] - start + offset)
      offset += stop - start
    return np.concatenate(slots), np.concatenate(tokens)
