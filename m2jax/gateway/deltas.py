"""A response as parsed deltas while its tokens arrive, up to a stop string.

The streamed deltas and the recorded message come from the same parser, so that they add
up to each other in every dialect.

A stop string ends the response when it appears in the content: in what the client sees,
not in the reasoning or the calls. The tokens up to the one that completes it are the
response; the text of the content ends before it. The engine does not search for
strings, so it may draw a few more tokens before it is cancelled; these are dropped,
unrecorded. Each token that is kept was sampled from the policy's distribution, so
training sessions honour stop strings, as they do a token limit.

A tool of the type CUSTOM takes one text, its argument CUSTOM_INPUT, by whatever name
the model calls it: the client gets that, and gives it back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

from m2jax.text import chat
from m2jax.text import tokenizer as tokenizer_lib

CUSTOM, CUSTOM_INPUT = 'custom', 'input'


class Deltas:
  """Parses one response; each method returns the new deltas.

  Attributes:
    tokens: number of tokens read; none is read after a stop string.
    stop: the stop string that ended the response, or None.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    tools: Sequence[dict] | None,
    stops: Sequence[str] = (),
    version: str = 'm2',
  ):
    self.tokens = 0
    self.stop: str | None = None
    self._detokenizer = tokenizer_lib.Detokenizer(tokenizer)
    self._parser = chat.StreamParser(tools, version)
    custom = (tool for tool in tools or () if tool.get('type') == CUSTOM)
    self._custom = frozenset(tool['function']['name'] for tool in custom)
    self._stops = stops
    self._longest = max(map(len, stops), default=0)
    self._held = ''  # the end of the content, which may begin a stop string
    self._content: list[str] = []  # with stop strings: the content before `_held`

  def feed(self, tokens: Sequence[int]) -> list[chat.Delta]:
    """Reads the next tokens; no deltas as long as they may be markup or a stop."""
    if not self._stops:
      self.tokens += len(tokens)
      return self._read(self._detokenizer.push(tokens))
    out: list[chat.Delta] = []
    for token in tokens:
      if self.stop is not None:
        break
      self.tokens += 1
      out += self._checked(self._read(self._detokenizer.push([token])))
    return out

  def finish(self) -> list[chat.Delta]:
    """Ends the response, and resolves what was held back.

    Markup that is no readable call comes last, as content.
    """
    out: list[chat.Delta] = []
    if self.stop is None:
      out = self._read(self._detokenizer.flush())
      out += self._renamed(self._parser.finish())
      if self._stops:
        out = list(self._checked(out))
    if self._held and self.stop is None:
      out.append(self._say(self._held))
      self._held = ''
    message = self.message
    if unread := message.shown.removeprefix(message.content):
      out.append(chat.Delta('content', unread))
    return out

  @property
  def message(self) -> chat.Message:
    """The message so far; complete after `finish` or a stop string."""
    message = self._parser.message
    if self._custom:
      calls = tuple(map(self._call, message.tool_calls))
      message = dataclasses.replace(message, tool_calls=calls)
    if self.stop is not None:
      message = dataclasses.replace(message, content=''.join(self._content))
    return message

  def _read(self, pieces: Iterable[chat.Piece]) -> list[chat.Delta]:
    return self._renamed(self._parser.feed(pieces))

  def _renamed(self, deltas: list[chat.Delta]) -> list[chat.Delta]:
    if not self._custom:
      return deltas
    return [d._replace(call=self._call(d.call)) if d.call else d for d in deltas]

  def _call(self, call: chat.ToolCall) -> chat.ToolCall:
    """A call of a custom tool with its one text; other calls as they are."""
    found = call.arguments
    if call.name not in self._custom:
      return call
    if CUSTOM_INPUT in found:
      text = found[CUSTOM_INPUT]
    elif len(found) > 1:
      text = json.dumps(found, ensure_ascii=False)
    else:
      text = ''.join(found.values())  # undeclared ones are strings
    return dataclasses.replace(call, arguments={CUSTOM_INPUT: text})

  def _checked(self, deltas: Iterable[chat.Delta]) -> Iterable[chat.Delta]:
    for delta in deltas:
      if delta.kind != 'content':
        yield delta
        continue
      text = self._held + delta.text
      found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
      if found:
        end, self.stop = min(found)
        self._held = ''
      else:
        end = len(text) - self._pending(text)
        self._held = text[end:]
      if end:
        yield self._say(text[:end])
      if found:
        return

  def _pending(self, text: str) -> int:
    """Characters at the end of the text that may begin a stop string."""
    for size in range(min(len(text), self._longest - 1), 0, -1):
      if any(stop.startswith(text[-size:]) for stop in self._stops):
        return size
    return 0

  def _say(self, text: str) -> chat.Delta:
    self._content.append(text)
    return chat.Delta('content', text)


def message(parsed: chat.Message, call_prefix: str) -> dict:
  """A parsed response as an OpenAI message.

  Args:
    call_prefix: the ids of the calls are '{call_prefix}_{index}'.
  """
  message = parsed.to_openai()
  for i, call in enumerate(message.get('tool_calls') or ()):
    call['id'] = f'{call_prefix}_{i}'
  return message


def joined(deltas: Iterable[chat.Delta]) -> list[chat.Delta]:
  """The same deltas, with neighbours of one text as one."""
  out: list[chat.Delta] = []
  for delta in deltas:
    if delta.call is None and out and out[-1].kind == delta.kind:
      out[-1] = out[-1]._replace(text=out[-1].text + delta.text)
    else:
      out.append(delta)
  return out
