"""Sessions: one per API key, each a forest of recorded completions (law 4).

A request extends a recorded completion if its tools are the same, its messages up to
the last assistant message are the messages of that completion plus its answer, and the
template renders them as before. Its prompt is then the recorded prompt and response
ids, and the encoding of what follows. Any other request forks: its prompt is the full
encoding of its messages, and its reason (`forks`) is counted.

Many clients drop the reasoning of their history, which M2 needs (facts/
m2-and-forge.md §2.3). `restored` gives it back: to an assistant message without
reasoning whose call ids are those of a completion, or whose content is that of a
completion after the same messages. The result extends like that of a client that kept
it.

A session stores only what this needs: the token ids that each completion adds to its
parent, 32 bytes per message (`history`) and a few digests, but no texts. `Limits` bound
its size; above them the least recently extended conversation is deleted.

Keys are secrets, and nothing stores them. A session is found by a digest of its key
with a secret of this process, so that how long a search takes says nothing about other
keys. Records have the session's name: one that `open` is given, or a random one.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import secrets
import threading
import time
import uuid

from m2jax.gateway import forks
from m2jax.gateway import history as history_lib
from m2jax.gateway.errors import ApiError
from m2jax.gateway.history import History
from m2jax.gateway.nodes import Node, name_digest

MODES = ('training', 'evaluation')


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a session.

  Attributes:
    completions: maximum completions that later requests can extend.
    bytes: maximum bytes of token ids and digests.
  """

  completions: int
  bytes: int


class Session:
  """The mode and the recorded completions of an API key, for the gateway's loop only.

  Attributes:
    name: the session's name in records; not a secret.
    digest: digest of its key (`Sessions.digest`).
    mode: 'training' (sampling fields are overridden) or 'evaluation'.
    opened: whether the key was registered; otherwise a client chose it.
    used_s: monotonic time of its last request.
    requests, turns: number of completions requested and recorded so far.
    size_bytes: approximate size of its completions in memory.
  """

  def __init__(
    self, name: str, digest: bytes, mode: str, limits: Limits, *, opened: bool = False
  ):
    self.name = name
    self.digest = digest
    self.mode = mode
    self.opened = opened
    self.used_s = time.monotonic()
    self.requests = self.turns = 0
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
    self._prompts: collections.Counter[bytes] = collections.Counter()

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
    self._prompts[node.prompt] += 1
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
      self._prompts[node.prompt] -= 1
      if not self._prompts[node.prompt]:
        del self._prompts[node.prompt]

  def restored(self, history: History) -> tuple[History, dict[int, Node]]:
    """The history with dropped reasoning, and the completions that it is from.

    Returns:
      The history with the digests of the reasoning; by message index, the completions.
    """
    if not self._nodes:
      return history, {}
    found = []

    def find(claim: str, key: bytes) -> bytes | None:
      node = self._nodes.get(claim)
      if node is None:
        # If one of these answers had no reasoning, nothing was dropped.
        nodes = self._by_key.get(key, [])
        node = min(reversed(nodes), key=lambda node: node.has_reasoning, default=None)
      if node is None or not node.has_reasoning:
        return None
      found.append(node)
      return node.reasoning

    history, changed = history_lib.with_reasoning(history, find)
    return history, dict(zip(changed, found, strict=True))

  def is_repeated(self, tools: bytes, history: History) -> bool:
    """Whether a recorded request had the same tools and messages: a retry."""
    return history_lib.digest(tools, history.records) in self._prompts

  def find(self, tools: bytes, history: History) -> Node | None:
    """The completion with the request's messages up to the last assistant message.

    Of several completions the one with the same call ids, else the newest.

    Args:
      tools: digest of the request's tools.
    """
    if history.last < 0:
      return None
    reasoning = history_lib.reasoning_of(history.records, history.last)
    key = history_lib.answer_key(history.records, history.last)
    nodes = [
      node
      for node in reversed(self._by_key.get(key, []))
      if node.tools == tools and node.reasoning == reasoning
    ]
    same = (node for node in nodes if node.answer.call_ids == history.last_calls)
    return next(same, nodes[0] if nodes else None)

  def has_agent(self, agent: str) -> bool:
    """Whether a stored completion is of this sub-agent."""
    digest = name_digest(agent)
    return any(node.agent == digest for node in self._nodes.values())

  def has_window(self, window: str) -> bool:
    """Whether a stored completion is of this context window."""
    digest = name_digest(window)
    return any(node.window == digest for node in self._nodes.values())

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
    """The key of forks.REASONS for a request that extends no completion."""
    reason = forks.reason(self._nodes.values(), tools, history)
    if self._forgot and history.last >= 0 and reason in ('first', 'new_conversation'):
      return 'forgotten'
    return 'new_conversation' if self._forgot and reason == 'first' else reason


def _answer(node: Node) -> bytes:
  return history_lib.content_digest(node.records, len(node.roles) - 1)


class Sessions:
  """The sessions, found by key. `open` and `close` may be called from any thread."""

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
      limits: each session's limits.
    """
    _check_mode(unknown_mode)
    self._accept_unknown = accept_unknown
    self._unknown_mode = unknown_mode
    self._max_unknown = max_unknown
    self._max_unknown_bytes = max_unknown_bytes
    self._limits = limits
    self._lock = threading.Lock()
    self._secret = secrets.token_bytes(32)
    self._opened: dict[bytes, Session] = {}
    self._unknown: collections.OrderedDict[bytes, Session] = collections.OrderedDict()

  def digest(self, key: str) -> bytes:
    """What replaces a key wherever one is looked up; differs in each process."""
    data = key.encode('utf-8', 'surrogatepass')
    return hashlib.blake2b(data, key=self._secret, digest_size=32).digest()

  def open(self, key: str, mode: str = 'training', name: str | None = None) -> Session:
    """Registers a key.

    Args:
      name: the session's name in records; None: the key, which then must be of no use
        to those who read the records.

    Raises:
      ValueError: the key is not printable ASCII without spaces, or is open already.
    """
    _check_mode(mode)
    if not valid_key(key):
      raise ValueError('session key: use 1 to 256 printable ASCII characters')
    digest = self.digest(key)
    with self._lock:
      if digest in self._opened or digest in self._unknown:
        raise ValueError('this session is open already; close it or use a new key')
      session = Session(name or key, digest, mode, self._limits, opened=True)
      self._opened[digest] = session
      return session

  def close(self, key: str):
    """Deletes a session. Requests in flight still finish and are recorded."""
    self.close_digest(self.digest(key))

  def close_digest(self, digest: bytes):
    """`close` by the key's digest."""
    with self._lock:
      self._opened.pop(digest, None)
      self._unknown.pop(digest, None)

  def find(self, key: str) -> Session:
    """The session of a request's key; for an unknown key a new one, not stored yet.

    Raises:
      ApiError: 401, the key is not registered and unknown keys are not accepted.
    """
    digest = self.digest(key)
    with self._lock:
      session = self._opened.get(digest) or self._unknown.get(digest)
      if session is not None:
        session.used_s = time.monotonic()
        return session
    if not self._accept_unknown or not valid_key(key):
      raise ApiError(
        401,
        'this API key is not a session of this gateway; open one, or set '
        'accept_unknown_keys',
        code='invalid_api_key',
      )
    name = f'client-{uuid.uuid4().hex}'
    return Session(name, digest, self._unknown_mode, self._limits)

  def keep(self, session: Session) -> Session:
    """Stores the session of a request that passed all checks.

    Returns the stored session: another request of the key may have been first.
    """
    digest = session.digest
    with self._lock:
      if session.opened or digest in self._opened:  # or closed since: not stored
        return self._opened.get(digest, session)
      session = self._unknown.setdefault(digest, session)
      self._unknown.move_to_end(digest)
      self._trim()
      return session

  def forget_idle(self, idle_s: float) -> int:
    """Deletes unknown sessions without a request for so long; returns their number."""
    oldest_s = time.monotonic() - idle_s
    with self._lock:
      idle = [d for d, session in self._unknown.items() if session.used_s < oldest_s]
      for digest in idle:
        del self._unknown[digest]
    return len(idle)

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
