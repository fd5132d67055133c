"""Sessions: one per API key, each a forest of recorded completions (law 4).

A request extends a recorded completion if its tools are the same, its messages up to
the last assistant message are the messages of that completion plus its answer, and the
template renders them as before. Its prompt is then the recorded prompt and response
ids, and the encoding of what follows. Any other request forks: its prompt is the full
encoding of its messages, and its reason is counted.

A session stores only what this needs: the token ids that each completion adds to its
parent, 32 bytes per message (`history`) and a few digests, but no texts. `Limits` bound
its size; above them the least recently extended conversation is deleted.
"""

from __future__ import annotations

import collections
import dataclasses
import threading

import numpy as np

from m2jax.gateway import history as history_lib
from m2jax.gateway.errors import ApiError
from m2jax.gateway.history import History

# Reasons why a request does not extend a recorded completion. Each has a counter.
FORK_REASONS = {
  'first': 'the session had no completions yet',
  'new_conversation': 'a different first message: a sub-agent, or a restart',
  'resampled': 'a recorded request was sent again',
  'system_changed': 'the system message differs',
  'tools_changed': 'the tools differ',
  'reasoning_dropped': 'an assistant message came back without its reasoning',
  'assistant_edited': 'an assistant message differs from what was returned',
  'thinking_closed': 'after a new user message the template omits earlier thinking',
  'history_rewritten': 'messages were removed, inserted or edited',
  'forgotten': 'nothing stored matches, and completions were deleted for the limits',
}

MODES = ('training', 'evaluation')

# Approximate size of a completion's objects and table entries, besides its data.
_COMPLETION_BYTES = 1000


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a session.

  Attributes:
    completions: maximum completions that later requests can extend.
    bytes: maximum bytes of token ids and digests.
  """

  completions: int
  bytes: int


class Node:
  """A recorded completion, which later requests may extend.

  Attributes:
    id: the completion's id.
    parent: the completion that it extends, or None.
    tools: digest of the request's tools.
    call_ids: digest of the ids of the answer's tool calls.
    closed: whether the response ends with the end-of-message token.
    records, roles: of the messages after the parent's, ending with the answer
      (`History`).
    new_ids: token ids of prompt and response after the parent's.
    messages, tokens: length of the whole conversation.
    key: for finding the completion that a request extends.
  """

  __slots__ = (
    'call_ids', 'closed', 'id', 'key', 'messages', 'new_ids', 'parent', 'records',
    'roles', 'tokens', 'tools',
  )  # fmt: skip

  def __init__(
    self,
    completion_id: str,
    parent: Node | None,
    tools: bytes,
    conversation: tuple[bytes, str],
    new_ids: np.ndarray,
    *,
    call_ids: bytes,
    closed: bool,
  ):
    """Stores the new part of `conversation`, records and roles of all messages."""
    records, roles = conversation
    start = parent.messages if parent else 0
    self.id, self.parent, self.tools = completion_id, parent, tools
    self.call_ids, self.closed = call_ids, closed
    self.records = records[start * history_lib.RECORD_BYTES :]
    self.roles = roles[start:]
    self.new_ids = new_ids
    self.messages = len(roles)
    self.tokens = len(new_ids) + (parent.tokens if parent else 0)
    self.key = history_lib.digest(tools, records)

  def ids(self) -> np.ndarray:
    """Token ids of prompt and response, int32."""
    parts, node = [], self
    while node is not None:
      parts.append(node.new_ids)
      node = node.parent
    return np.concatenate(parts[::-1])

  @property
  def size_bytes(self) -> int:
    """Approximate size in memory."""
    return 4 * len(self.new_ids) + len(self.records) + len(self.roles) + (
      _COMPLETION_BYTES
    )  # fmt: skip


class Session:
  """The mode and the recorded completions of an API key, for the gateway's loop only.

  Attributes:
    key: the API key.
    mode: 'training' (sampling fields are overridden) or 'evaluation'.
    opened: whether the key was registered; otherwise a client chose it.
    turns: number of completions recorded so far.
    size_bytes: approximate size of its completions in memory.
  """

  def __init__(self, key: str, mode: str, limits: Limits, *, opened: bool = False):
    self.key = key
    self.mode = mode
    self.opened = opened
    self.turns = 0
    self.size_bytes = 0
    self._limits = limits
    self._forgot = False
    # Nodes by completion id, parents first; conversations by their first completion,
    # the least recently extended first.
    self._nodes: dict[str, Node] = {}
    self._conversations: collections.OrderedDict[str, list[Node]] = (
      collections.OrderedDict()
    )
    self._by_key: dict[bytes, list[Node]] = {}
    self._by_answer: dict[bytes, str] = {}

  def add(self, node: Node):
    """Adds a recorded completion; deletes conversations above the limits."""
    first = node
    while first.parent is not None:
      first = first.parent
    if node.parent is not None and first.id not in self._conversations:
      return  # its conversation was deleted while the engine worked
    self._conversations.setdefault(first.id, []).append(node)
    self._conversations.move_to_end(first.id)
    self._nodes[node.id] = node
    self._by_key.setdefault(node.key, []).append(node)
    self._by_answer[_answer(node)] = node.id
    self.size_bytes += node.size_bytes
    limits = self._limits
    while len(self._nodes) > limits.completions or self.size_bytes > limits.bytes:
      self._forget()

  def _forget(self):
    self._forgot = True
    _, nodes = self._conversations.popitem(last=False)
    for node in nodes:
      del self._nodes[node.id]
      self.size_bytes -= node.size_bytes
      same = self._by_key[node.key]
      same.remove(node)
      if not same:
        del self._by_key[node.key]
      if self._by_answer.get(_answer(node)) == node.id:
        del self._by_answer[_answer(node)]

  def find(self, tools: bytes, history: History) -> Node | None:
    """The completion with the request's messages up to the last assistant message.

    Of several completions the one with the same call ids, else the newest.

    Args:
      tools: digest of the request's tools.
    """
    if history.last < 0:
      return None
    end = (history.last + 1) * history_lib.RECORD_BYTES
    nodes = self._by_key.get(history_lib.digest(tools, history.records[:end]))
    if not nodes:
      return None
    same = (node for node in reversed(nodes) if node.call_ids == history.last_calls)
    return next(same, nodes[-1])

  def follows(self, history: History) -> str | None:
    """Id of the completion of the last recorded answer in the messages.

    An answer is identified by its call ids, or by its content and calls; the client may
    have dropped its reasoning and rewritten the messages before it.
    """
    for claim, digest in history.answers():
      if claim in self._nodes:
        return claim
      if digest in self._by_answer:
        return self._by_answer[digest]
    return None

  def fork_reason(self, tools: bytes, history: History) -> str:
    """The key of FORK_REASONS for a request that extends no completion."""
    reason = self._fork_reason(tools, history)
    if self._forgot and history.last >= 0 and reason in ('first', 'new_conversation'):
      return 'forgotten'
    return 'new_conversation' if self._forgot and reason == 'first' else reason

  def _fork_reason(self, tools: bytes, history: History) -> str:
    if not self._nodes:
      return 'first'
    best, common = self._closest(tools, history)
    if common >= best.messages - 1 and len(history) == best.messages - 1:
      return 'resampled' if best.tools == tools else 'tools_changed'
    if common == best.messages:
      return 'tools_changed' if best.tools != tools else 'history_rewritten'
    if common == len(history):
      return 'history_rewritten'
    while best.parent is not None and best.parent.messages > common:
      best = best.parent
    at = common - (best.parent.messages if best.parent else 0)
    roles = best.roles[at] + history.roles[common]
    if 's' in roles and common == 0:
      return 'system_changed'
    if set(history.roles[:common]) <= {'s'}:
      return 'new_conversation'
    if roles == 'aa':
      before = history_lib.content_digest(best.records, at)
      same = before == history_lib.content_digest(history.records, common)
      dropped = same and not history_lib.has_reasoning(history.records, common)
      return 'reasoning_dropped' if dropped else 'assistant_edited'
    return 'history_rewritten'

  def _closest(self, tools: bytes, history: History) -> tuple[Node, int]:
    """The completion that shares most messages with a request, and their number.

    Among equals prefers the same tools, then the shortest conversation.
    """
    shared: dict[str, int] = {}
    best, best_rank = None, ()
    for node in self._nodes.values():  # parents first
      start = 0
      if node.parent is not None:
        start = shared[node.parent.id]
      if node.parent is None or start == node.parent.messages:
        rest = history.records[start * history_lib.RECORD_BYTES :]
        start += history_lib.common(node.records, rest)
      shared[node.id] = start
      rank = start, node.tools == tools, -node.messages
      if best is None or rank > best_rank:
        best, best_rank = node, rank
    return best, best_rank[0]


def _answer(node: Node) -> bytes:
  return history_lib.content_digest(node.records, len(node.roles) - 1)


class Sessions:
  """The sessions by key. `open` and `close` may be called from any thread."""

  def __init__(
    self,
    *,
    accept_unknown: bool,
    unknown_mode: str = 'evaluation',
    max_unknown: int,
    max_unknown_bytes: int,
    limits: Limits,
  ):
    """Starts empty.

    Args:
      accept_unknown: whether an unregistered key opens a session; else it gets a 401.
      unknown_mode: the mode of such a session.
      max_unknown, max_unknown_bytes: maximum number of such sessions, and their total
        size; above it, the least recently used is deleted.
      limits: of each session.
    """
    _check_mode(unknown_mode)
    self._accept_unknown = accept_unknown
    self._unknown_mode = unknown_mode
    self._max_unknown = max_unknown
    self._max_unknown_bytes = max_unknown_bytes
    self._limits = limits
    self._lock = threading.Lock()
    self._opened: dict[str, Session] = {}
    self._unknown: collections.OrderedDict[str, Session] = collections.OrderedDict()

  def open(self, key: str, mode: str = 'training') -> Session:
    """Registers a key.

    Raises:
      ValueError: the key is not printable ASCII without spaces, or is open already.
    """
    _check_mode(mode)
    if not valid_key(key):
      raise ValueError(f'session key {key!r}: use 1 to 256 printable ASCII characters')
    with self._lock:
      if key in self._opened or key in self._unknown:
        raise ValueError(f'session {key!r} is open already; close it or use a new key')
      session = self._opened[key] = Session(key, mode, self._limits, opened=True)
      return session

  def close(self, key: str):
    """Deletes a session. Requests in flight still finish and are recorded."""
    with self._lock:
      self._opened.pop(key, None)
      self._unknown.pop(key, None)

  def find(self, key: str) -> Session:
    """The session of a request's key; for an unknown key a new one, not stored yet.

    Raises:
      ApiError: 401, the key is not registered and unknown keys are not accepted.
    """
    with self._lock:
      session = self._opened.get(key) or self._unknown.get(key)
      if session is not None:
        return session
    if not self._accept_unknown or not valid_key(key):
      raise ApiError(
        401,
        'this API key is not a session of this gateway; open one, or set '
        'accept_unknown_keys',
        code='invalid_api_key',
      )
    return Session(key, self._unknown_mode, self._limits)

  def keep(self, session: Session) -> Session:
    """Stores the session of a request that passed all checks.

    Returns the stored session: another request of the key may have been first.
    """
    key = session.key
    with self._lock:
      if session.opened or key in self._opened:  # or closed since: not stored
        return self._opened.get(key, session)
      session = self._unknown.setdefault(key, session)
      self._unknown.move_to_end(key)
      self._trim()
      return session

  def trim(self):
    """Deletes unknown sessions above their total size."""
    with self._lock:
      self._trim()

  def _trim(self):
    unknown = self._unknown
    size_bytes = sum(session.size_bytes for session in unknown.values())
    while len(unknown) > 1 and (
      len(unknown) > self._max_unknown or size_bytes > self._max_unknown_bytes
    ):
      size_bytes -= unknown.popitem(last=False)[1].size_bytes

  def __len__(self) -> int:
    return len(self._opened) + len(self._unknown)


def valid_key(key: str) -> bool:
  """Whether a key can be sent in a header unchanged."""
  return 0 < len(key) <= 256 and key.isascii() and key.isprintable() and ' ' not in key


def _check_mode(mode: str):
  if mode not in MODES:
    raise ValueError(f'session mode {mode!r}: must be one of {MODES}')
