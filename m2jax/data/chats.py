"""Chats as JSON lines of OpenAI messages, and as samples for SFT.

Each line of a file is a chat, `{"messages": […], "tools": […]}`. `tools` is optional,
and so is `task`, the spec of the task that it solves; other keys are ignored, but for
`training`: lines with `training: false`, such as the calls of authors and judges
(`m2jax_pipelines.llm`), are never trained. Results of parallel calls may have any
order.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from m2jax.forest import Sample
from m2jax.text import chat, json_lines, markup, tokenizer


class Chat(NamedTuple):
  """A whole conversation.

  Attributes:
    name: name in error messages.
    messages, tools: OpenAI dicts.
    trained: index of the only message that is trained; None: all of the assistant's.
    task: spec of its task, if the file has it.
  """

  name: str
  messages: Sequence[Mapping[str, Any]]
  tools: Sequence[Mapping[str, Any]] = ()
  trained: int | None = None
  task: str = ''

  def text(self) -> str:
    """The chat as rendered by the template."""
    return chat.render(self.messages, self.tools)


def with_system(messages: Iterable[Mapping[str, Any]], system: str | None) -> list:
  """Prepends a system prompt, unless it is None or the messages have one."""
  messages = list(messages)
  has_system = messages and messages[0].get('role') in ('system', 'developer')
  if system is None or has_system:
    return messages
  return [{'role': 'system', 'content': system}, *messages]


def read(
  path: str | os.PathLike,
  *,
  system: str | None = None,
  tools: Sequence[Mapping[str, Any]] = (),
) -> list[Chat]:
  """Reads chats; those with `training: false` are skipped and counted in a warning.

  Args:
    path: a file of JSON lines.
    system, tools: defaults for chats without them.

  Raises:
    FileNotFoundError: no such file.
    ValueError: a line is not a chat with an assistant message; names the line. Or
      there are no chats that may be trained.
  """
  chats, untrained = [], 0
  with open(path, 'rb') as file:
    for number, line in json_lines.lines(file):
      if not line.strip():
        continue
      where = f'{os.fspath(path)}, line {number}'
      try:
        record = json_lines.loads(line)
        if not isinstance(record, dict) or 'messages' not in record:
          raise ValueError(_other(record))
        if not trainable(record):
          untrained += 1
          continue
        found = Chat(
          where,
          chat.in_call_order(with_system(record['messages'], system), complete=False),
          record.get('tools') or tools,
          task=str(record.get('task', '')),
        )
        owned = any(piece.owned for piece in chat.segments(found.messages, found.tools))
      except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f'{where}: not a chat: {why}') from error
      if not owned:
        raise ValueError(f'{where}: no assistant message to train on')
      chats.append(found)
  marked = f'{untrained} lines with training: false'
  if not chats:
    why = f' to train: {marked}' if untrained else ''
    raise ValueError(f'{os.fspath(path)} contains no chats{why}')
  if untrained:
    logging.warning('%s: %s are skipped', os.fspath(path), marked)
  return chats


def _other(record: Any) -> str:
  """What a record without messages has instead."""
  if not isinstance(record, dict):
    return f'a JSON {type(record).__name__}; each line must be an object with messages'
  has = ', '.join(list(record)[:8])
  share = ' (ShareGPT: from, value)' if 'conversations' in record else ''
  return (
    f"no field 'messages', but {has or 'nothing'}{share}; write each chat as "
    '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": '
    '"…"}, …]}'
  )


def trainable(record: Mapping[str, Any]) -> bool:
  """Whether a record may be trained. Raises ValueError unless it says so plainly."""
  allowed = record.get('training', True)
  if not isinstance(allowed, bool):
    raise ValueError(f'training is {allowed!r}: expected true or false')
  return allowed


def encode(
  chats: Iterable[Chat],
  tok: tokenizer.Tokenizer,
  max_tokens: int,
  templates: Mapping[str, chat.Template] | None = None,
) -> list[list[Sample]]:
  """Chats as samples that train the assistant's tokens; the rest is context.

  With `templates` each chat is shown in one of them, drawn by its name, so that all
  chats of one conversation have the same. They differ in what surrounds the assistant's
  tokens, which are those that M2's parser reads in each.

  The answers to each user message are a sample, since M2's template omits the reasoning
  before the last one: each is trained in the context in which it is generated. The
  samples of a chat are a group, and so are chats that train one message each of the
  same conversation. Samples of more than `max_tokens` are skipped with a warning. Those
  that end without thinking are counted in one: generation begins with `<think>`, which
  they lack.

  Raises:
    ValueError: no chat remains, or one has no assistant message.
  """
  chats, groups, unthinking, before = list(chats), [], 0, None
  for found in chats:
    template, samples = _drawn(found, templates), []
    turns = list(_turns(found, template))
    if not turns:
      raise ValueError(f'{found.name}: no assistant message to train on')
    for messages, trained in turns:
      pieces = chat.segments(messages, found.tools, template=template)
      pieces = [p._replace(owned=p.owned and p.message in trained) for p in pieces]
      ids, owned = tokenizer.encode_chat(tok, pieces)
      length = max(i for i, model in enumerate(owned) if model) + 1
      if length > max_tokens:
        logging.warning(
          '%s has %d tokens, more than %d: skipped', found.name, length, max_tokens
        )
        continue
      samples.append(sample(ids[:length], owned[:length]))
      said = ''.join(p.text for p in pieces if p.message == trained[-1])
      unthinking += markup.THINK_END not in said
    if not samples:
      continue
    if before is not None and _continues(found, before):
      groups[-1] += samples
    else:
      groups.append(samples)
    before = found
  if not groups:
    raise ValueError(
      f'none of {len(chats)} demonstrations has at most {max_tokens} tokens: raise the '
      'limit or shorten them'
    )
  if unthinking:
    logging.warning(
      '%d of %d turns end without thinking: generation begins with %s, and a policy '
      'that learns from them does not know how to go on; give their messages '
      'reasoning_content',
      *(unthinking, sum(map(len, groups)), markup.THINK),
    )
  return groups


def trained_by_role(
  groups: Iterable[Sequence[Sample]], tok: tokenizer.Tokenizer
) -> dict[str, float]:
  """`trained/ROLE`: share of the trained tokens by the role of their message.

  And `trained/ends`: share of the trained messages whose end is trained. Roles are read
  from the ids, where a message begins with a special token and its role; a loss mask
  that trains other roles than the assistant's shows.
  """
  counts = dict.fromkeys(('assistant', 'tool', 'user', 'system'), 0)
  messages = ends = 0
  for sample in itertools.chain.from_iterable(groups):
    trained = np.zeros(len(sample.tokens), bool)
    weights = sample.weights
    trained[sample.prompt_length :] = True if weights is None else weights != 0
    starts = np.flatnonzero(sample.tokens == tok.role_id)
    for start, end in itertools.pairwise((*starts, len(sample.tokens))):
      if count := int(trained[start:end].sum()):
        role = tok.decode(sample.tokens[start + 1 : start + 9]).partition('\n')[0]
        name = {'ai': 'assistant'}.get(role, role)
        counts[name if name in counts else 'user'] += count
        messages += 1
        ends += bool((trained & (sample.tokens == tok.eos_id))[start:end].any())
  total = max(sum(counts.values()), 1)
  shares = {f'trained/{role}': count / total for role, count in counts.items()}
  return shares | {'trained/ends': ends / max(messages, 1)}


def _turns(
  found: Chat, template: chat.Template
) -> Iterator[tuple[Sequence[Mapping[str, Any]], list[int]]]:
  """The messages up to the end of each turn, and the indices of those to train."""
  messages, start = found.messages, 0
  roles = [message.get('role') for message in messages]
  if found.trained is not None:
    yield messages[: found.trained + 1], [found.trained]
    return
  users = [i for i, role in enumerate(roles) if role == 'user']
  for end in [*([] if template.keep_all_thinking else users), len(messages)]:
    if trained := [i for i in range(start, end) if roles[i] == 'assistant']:
      yield messages[:end], trained
    start = end


def _drawn(found: Chat, templates: Mapping[str, chat.Template] | None) -> chat.Template:
  """The template of a chat."""
  if not templates:
    return chat.DEFAULT
  rng = random.Random(f'template/{found.name}')
  return templates[rng.choice(sorted(templates))]


def _continues(found: Chat, before: Chat) -> bool:
  """Whether it trains a later message of the same conversation."""
  if found.trained is None or before.trained is None or found.name != before.name:
    return False
  return found.trained > before.trained


def sample(tokens: Sequence[int], loss_mask: Sequence[int]) -> Sample:
  """A `forest.Sample` that trains the tokens with a true mask.

  Args:
    tokens: [S] ids.
    loss_mask: [S], 0 or 1. Token 0 cannot be trained: nothing predicts it.

  Raises:
    ValueError: lengths differ, the mask of token 0 is true, or no mask is.
  """
  tokens = np.asarray(tokens, np.int32)
  mask = np.asarray(loss_mask, bool)
  if tokens.ndim != 1 or tokens.shape != mask.shape:
    raise ValueError(f'tokens {tokens.shape} and loss_mask {mask.shape} must be [S]')
  trained = np.flatnonzero(mask)
  if len(trained) == 0:
    raise ValueError('loss_mask trains no token')
  if trained[0] == 0:
    raise ValueError('loss_mask trains token 0, which nothing predicts')
  start = int(trained[0])
  weights = None if mask[start:].all() else mask[start:].astype(np.float32)
  return Sample(tokens, start, weights=weights)
