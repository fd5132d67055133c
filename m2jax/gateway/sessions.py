"""Sessions: one per API key, each a tree of recorded completions (law 4).

A request extends a recorded completion when its history up to the last assistant
message is the history that completion answered plus the answer the client was given,
under the same tools, and the template writes that history as before. Its prompt is then
the recorded ids, the recorded response ids and the encoding of what the template adds
after them. Any other request forks: its prompt is the full encoding, and a reason is
counted.

Messages are compared by what the template shows of them; call ids are not part of that,
but decide between completions that said the same.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading

from m2jax.gateway.errors import ApiError

# Why a request did not extend a recorded completion. Each is a counter.
FORK_REASONS = {
  'first': 'the session had no completions yet',
  'new_conversation': 'another first message: a sub-agent, or a new start',
  'resampled': 'a recorded request was sent again',
  'system_changed': 'the system message differs',
  'tools_changed': 'the tools differ',
  'reasoning_dropped': 'an assistant message came back without its reasoning',
  'assistant_edited': 'an assistant message differs from what was returned',
  'thinking_closed': 'after a new user message the template drops earlier thinking',
  'history_rewritten': 'messages were removed, inserted or edited',
}

MODES = ('training', 'evaluation')

# What the template shows of a message: (role, content), of an assistant message
# ('assistant', content, reasoning, ((name, arguments as JSON), ...)).
Shown = tuple


def shown(message: dict) -> Shown:
  """The comparable form of a message; None, '' and absence are the same."""
  role = message['role']
  content = message.get('content') or ''
  if isinstance(content, list):
    content = tuple(part['text'] for part in content)
  if role != 'assistant':
    return role, content
  calls = []
  for call in message.get('tool_calls') or ():
    function = call['function']
    arguments = function['arguments']
    if isinstance(arguments, str):
      arguments = json.loads(arguments)
    calls.append((function['name'], json.dumps(arguments)))
  return role, content, message.get('reasoning_content') or '', tuple(calls)


def call_ids(message: dict) -> tuple:
  """The ids of a message's tool calls, in order."""
  return tuple(call.get('id') for call in message.get('tool_calls') or ())


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
  """One recorded completion as the root of what may follow it.

  Attributes:
    id: the completion's id.
    tools: the request's tools as JSON.
    history: messages of the request, then the answer.
    call_ids: ids of the answer's tool calls.
    ids: prompt and response token ids.
    closed: the response ends with the end-of-message token.
  """

  id: str
  tools: str
  history: tuple[Shown, ...]
  call_ids: tuple
  ids: tuple[int, ...]
  closed: bool


class Session:
  """One API key's mode and its recorded completions. Used on the gateway's loop only.

  Attributes:
    key: the API key.
    mode: 'training' (sampling fields are overridden) or 'evaluation'.
    turns: completions recorded so far.
  """

  def __init__(self, key: str, mode: str):
    self.key = key
    self.mode = mode
    self.turns = 0
    self._nodes: list[Node] = []
    self._by_history: dict[tuple, list[Node]] = {}

  def add(self, node: Node):
    """Files a recorded completion."""
    self._nodes.append(node)
    self._by_history.setdefault((node.tools, node.history), []).append(node)

  def find(self, tools: str, history: tuple[Shown, ...], ids: tuple) -> Node | None:
    """The completion whose history, answer included, this is; the newest of equals.

    Args:
      tools: the request's tools as JSON.
      history: the request's messages up to the last assistant message.
      ids: that message's call ids, which decide between completions that said the same.
    """
    nodes = self._by_history.get((tools, history))
    if not nodes:
      return None
    return next((node for node in reversed(nodes) if node.call_ids == ids), nodes[-1])

  def fork_reason(self, tools: str, history: tuple[Shown, ...]) -> str:
    """Why a request that extends no completion does not: a key of FORK_REASONS.

    Args:
      tools: the request's tools as JSON.
      history: all messages of the request.
    """
    if not self._nodes:
      return 'first'

    # Judged against the completion that shares most; of equals, the one with least
    # beyond that.
    def closeness(node: Node) -> tuple:
      return _common(node.history, history), node.tools == tools, -len(node.history)

    best = max(self._nodes, key=closeness)
    common = _common(best.history, history)
    request = len(best.history) - 1
    if common >= request and len(history) == request:
      return 'resampled' if best.tools == tools else 'tools_changed'
    if common == len(best.history):
      return 'tools_changed' if best.tools != tools else 'history_rewritten'
    if common == len(history):
      return 'history_rewritten'
    old, new = best.history[common], history[common]
    if 'system' in (old[0], new[0]) and common == 0:
      return 'system_changed'
    if all(message[0] == 'system' for message in history[:common]):
      return 'new_conversation'
    if old[0] == new[0] == 'assistant':
      same_but_reasoning = (old[1], old[3]) == (new[1], new[3])
      return (
        'reasoning_dropped' if same_but_reasoning and not new[2] else 'assistant_edited'
      )
    return 'history_rewritten'


def _common(a: tuple, b: tuple) -> int:
  """Length of the common prefix."""
  for i, (x, y) in enumerate(zip(a, b, strict=False)):
    if x != y:
      return i
  return min(len(a), len(b))


class Sessions:
  """The sessions by key. `open` and `close` may be called from any thread."""

  def __init__(
    self, *, accept_unknown: bool, unknown_mode: str = 'evaluation', max_unknown: int
  ):
    """Starts empty.

    Args:
      accept_unknown: an unregistered key opens a session by itself; else it gets a 401.
      unknown_mode: the mode of such a session.
      max_unknown: most such sessions kept; beyond, the least recently used is forgotten
        and its next request starts over.
    """
    _check_mode(unknown_mode)
    self._accept_unknown = accept_unknown
    self._unknown_mode = unknown_mode
    self._max_unknown = max_unknown
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
      session = self._opened[key] = Session(key, mode)
      return session

  def close(self, key: str):
    """Forgets a key and its tree. Requests in flight still end and are recorded."""
    with self._lock:
      self._opened.pop(key, None)
      self._unknown.pop(key, None)

  def get(self, key: str, *, create: bool = True) -> Session | None:
    """The session of a request's key; None where it is unknown and not to be created.

    Raises:
      ApiError: 401, the key is not registered and unknown keys are not accepted.
    """
    with self._lock:
      session = self._opened.get(key)
      if session is not None:
        return session
      session = self._unknown.get(key)
      if session is not None:
        self._unknown.move_to_end(key)
        return session
      if not self._accept_unknown or not valid_key(key):
        raise ApiError(
          401,
          'this API key is not a session of this gateway; open one, or set '
          'accept_unknown_keys',
          code='invalid_api_key',
        )
      if not create:
        return None
      session = self._unknown[key] = Session(key, self._unknown_mode)
      if len(self._unknown) > self._max_unknown:
        self._unknown.popitem(last=False)
      return session

  def __len__(self) -> int:
    return len(self._opened) + len(self._unknown)


def valid_key(key: str) -> bool:
  """Whether a key can travel in a header as it is."""
  return 0 < len(key) <= 256 and key.isascii() and key.isprintable() and ' ' not in key


def _check_mode(mode: str):
  if mode not in MODES:
    raise ValueError(f'session mode {mode!r}: must be one of {MODES}')
