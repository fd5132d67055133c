"""Why a request extends no recorded completion of its session (law 4).

`reason` compares the messages with those of the completion that shares most of them.
The reasons that a client says itself, and `thinking_closed`, are found in `prompts`.
"""

from __future__ import annotations

from collections.abc import Collection

from m2jax.gateway import history as history_lib
from m2jax.gateway.history import History
from m2jax.gateway.nodes import Node

# Each has a counter.
REASONS = {
  'first': 'the session had no completions yet',
  'new_conversation': 'a different first message: a sub-agent, or a restart',
  'resampled': 'a recorded request was sent again',
  'system_changed': 'the system message differs',
  'tools_changed': 'the tools differ',
  'reasoning_dropped': 'an assistant message came back without its reasoning, and '
  'the gateway does not restore it',
  'retokenised': 'an assistant message came back with other white space inside: the '
  'same words, other tokens',
  'assistant_edited': 'an assistant message differs from what was returned',
  'context_edited': 'the agent edited its context, and says so',
  'auxiliary': 'the agent says that it is no request of its task: not trained, and '
  'nothing extends it',
  'compaction': 'the agent says that it asks for a summary of its context: the same',
  'sub_agent': 'the first request of a sub-agent, which says so',
  'thinking_closed': 'after a new user message the template omits earlier thinking',
  'history_rewritten': 'messages were removed, inserted or edited',
  'forgotten': 'nothing stored matches, and completions were deleted for the limits',
}


def reason(nodes: Collection[Node], tools: bytes, history: History) -> str:
  """The key of REASONS for a request that extends none of the completions.

  Args:
    nodes: the completions, parents first.
    tools: digest of the request's tools.
  """
  if not nodes:
    return 'first'
  best, common = _closest(nodes, tools, history)
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
    if same and not history_lib.has_reasoning(history.records, common):
      return 'reasoning_dropped'
    is_answer = at == len(best.roles) - 1
    if is_answer and not same and best.answer.words == history.words_at(common):
      return 'retokenised'
    return 'assistant_edited'
  return 'history_rewritten'


def _closest(
  nodes: Collection[Node], tools: bytes, history: History
) -> tuple[Node, int]:
  """The completion that shares most messages with a request, and their number.

  Among equals prefers the same tools, then the shortest conversation.
  """
  shared: dict[str, int] = {}
  best, best_rank = None, ()
  for node in nodes:  # parents first
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
