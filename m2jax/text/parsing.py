"""What M2 generated, read back: reasoning, content, typed tool calls, and a verdict.

Source: facts/m2-and-forge.md §2.2. The text parsed is what follows the generation
prompt `]~b]ai\\n<think>\\n`. Of reasoning and content only the newlines that the
template itself writes are removed, so parsing inverts rendering; parameters are
stripped, as the official guide does, and typed by the tool's schema (`arguments`).
Where vLLM delivers whatever it can find, a call of broken structure is kept apart.

One incremental parser serves both `parse` and streaming, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from m2jax.text import arguments
from m2jax.text.markup import EOS, THINK_END, TOOL_CALL, TOOL_CALL_END


class Status(enum.StrEnum):
  """Verdict on a call or a whole response; a response has its worst, last is worst.

  OK: well formed.
  INVALID_JSON: an argument does not fit its declared type; delivered as text.
  MALFORMED_STRUCTURE: a block without an `<invoke>`, text where only elements may
    stand, or text after the calls.
  UNCLOSED_BLOCK: `<minimax:tool_call>` never closed.
  UNCLOSED_THINKING: no `</think>`; a tool call ends the thinking, or nothing does.
  """

  OK = 'ok'
  INVALID_JSON = 'invalid_json'
  MALFORMED_STRUCTURE = 'malformed_structure'
  UNCLOSED_BLOCK = 'unclosed_block'
  UNCLOSED_THINKING = 'unclosed_thinking'


_SEVERITY = {status: rank for rank, status in enumerate(Status)}


def _new_id() -> str:
  return 'call_' + uuid.uuid4().hex[:24]


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """One call: arguments typed by the schema; `raw` is its text as generated."""

  name: str
  arguments: dict[str, Any]
  status: Status = Status.OK
  raw: str = dataclasses.field(default='', compare=False)
  id: str = dataclasses.field(default_factory=_new_id, compare=False)

  def to_openai(self) -> dict[str, Any]:
    """The call as an entry of OpenAI's `tool_calls`."""
    text = json.dumps(self.arguments, ensure_ascii=False)
    function = {'name': self.name, 'arguments': text}
    return {'id': self.id, 'type': 'function', 'function': function}


@dataclasses.dataclass(frozen=True)
class Message:
  """A parsed response.

  Attributes:
    content: text for the user.
    reasoning: text before `</think>`.
    tool_calls: calls to run: status OK or INVALID_JSON.
    status: worst verdict over the response.
    broken_calls: attempts that are not to be run, and text after the calls, in `raw`.
  """

  content: str = ''
  reasoning: str = ''
  tool_calls: tuple[ToolCall, ...] = ()
  status: Status = Status.OK
  broken_calls: tuple[ToolCall, ...] = ()

  def to_openai(self) -> dict[str, Any]:
    """The message as an OpenAI dict; `content` is None beside calls without text."""
    out: dict[str, Any] = {
      'role': 'assistant',
      'content': self.content or (None if self.tool_calls else ''),
      'reasoning_content': self.reasoning,
    }
    if self.tool_calls:
      out['tool_calls'] = [call.to_openai() for call in self.tool_calls]
    return out


class Delta(NamedTuple):
  """A step of a stream: `kind` 'reasoning_content' or 'content' with `text`, or
  'tool_call' with a complete `call`."""

  kind: str
  text: str = ''
  call: ToolCall | None = None


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Message:
  """Parses what the model generated after `]~b]ai\\n<think>\\n`.

  Args:
    text: the generated text, with or without the final `[e~[`.
    tools: OpenAI tool dicts; parameters they do not declare stay strings.

  Never raises on any text: `Message.status` is the verdict.
  """
  parser = StreamParser(tools)
  parser.feed(text)
  parser.finish()
  return parser.message


_EOS_PREFIXES = tuple(EOS[:n] for n in range(1, len(EOS) + 1))


def _prefixes(*markers: str) -> frozenset[str]:
  """What must wait at the end of a buffer, since a marker may complete it."""
  waits = {m[:n] for m in markers for n in range(1, len(m))}
  return frozenset(waits.union(_EOS_PREFIXES))


_THINK_WAITS = _prefixes(THINK_END, TOOL_CALL, '\n' + THINK_END, '\n' + TOOL_CALL)
_CONTENT_WAITS = _prefixes(TOOL_CALL, '\n' + TOOL_CALL)
_LONGEST_WAIT = len(TOOL_CALL)


class StreamParser:
  """`parse` over text that arrives in pieces; the chunking never changes the result.

  `feed` and `finish` return the deltas to send; `message` is complete after `finish`.
  A call is sent when its block closes. Text that may still turn out to be markup waits.
  """

  def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None):
    self._schemas = arguments.parameter_schemas(tools)
    self._state = StreamParser._thinking
    self._buffer = ''
    self._searched = 0  # chars of the buffer known to hold no awaited marker
    self._newlines_to_skip = 2  # the template's blank line after </think>
    self._reasoning: list[str] = []
    self._content: list[str] = []
    self._calls: list[ToolCall] = []
    self._broken: list[ToolCall] = []
    self._status = Status.OK
    self._out: list[Delta] = []

  @property
  def message(self) -> Message:
    """What has been parsed so far."""
    return Message(
      content=''.join(self._content),
      reasoning=''.join(self._reasoning),
      tool_calls=tuple(self._calls),
      status=self._status,
      broken_calls=tuple(self._broken),
    )

  def feed(self, text: str) -> list[Delta]:
    """Takes the next piece of generated text."""
    self._buffer += text
    return self._advance()

  def finish(self) -> list[Delta]:
    """Ends the response: a final `[e~[` is dropped, what waited is decided."""
    self._buffer = self._buffer.removesuffix(EOS)
    deltas = self._advance()
    if self._state is StreamParser._thinking:
      self._verdict(Status.UNCLOSED_THINKING)
      reasoning, call, rest = self._buffer.partition(TOOL_CALL)
      if call:
        # A call without </think> before it ends the thinking.
        self._think(reasoning.removesuffix('\n'))
        self._newlines_to_skip = 0
        self._go(StreamParser._answering, call + rest)
        deltas += self._advance()
      else:
        self._think(self._buffer)
        self._buffer = ''
    if self._state is StreamParser._answering:
      self._say(self._buffer)
    elif self._state is StreamParser._calling:
      self._break(Status.UNCLOSED_BLOCK, self._buffer)
    elif self._state is StreamParser._called and self._buffer.strip():
      self._break(Status.MALFORMED_STRUCTURE, self._buffer)
    self._go(StreamParser._done, '')
    return deltas + self._take()

  def _advance(self) -> list[Delta]:
    while self._state(self):
      pass
    return self._take()

  def _take(self) -> list[Delta]:
    out, self._out = self._out, []
    return out

  def _go(self, state: Callable[[StreamParser], bool], buffer: str) -> bool:
    self._state, self._buffer, self._searched = state, buffer, 0
    return True

  def _find(self, marker: str) -> int:
    """Where the marker stands in the buffer, or −1; reads no character twice."""
    at = self._buffer.find(marker, self._searched)
    if at < 0:
      self._searched = max(self._searched, len(self._buffer) - len(marker) + 1)
    return at

  # States. Each consumes what it can and says whether the next should run.

  def _thinking(self) -> bool:
    end = self._find(THINK_END)
    if end >= 0:
      self._think(self._buffer[:end].removesuffix('\n'))
      return self._go(StreamParser._answering, self._buffer[end + len(THINK_END) :])
    # Markup before </think> is reasoning, so a call here must wait for the end.
    call = self._buffer.find(TOOL_CALL)
    ready = (
      call if call >= 0 else len(self._buffer) - _waiting(self._buffer, _THINK_WAITS)
    )
    if call > 0 and self._buffer[call - 1] == '\n':
      ready -= 1
    if ready:
      self._think(self._buffer[:ready])
      self._buffer = self._buffer[ready:]
      self._searched = max(0, self._searched - ready)
    return False

  def _answering(self) -> bool:
    while self._newlines_to_skip and self._buffer:
      if self._buffer[0] != '\n':
        self._newlines_to_skip = 0
        break
      self._buffer = self._buffer[1:]
      self._newlines_to_skip -= 1
    call = self._buffer.find(TOOL_CALL)
    if call >= 0:
      self._say(self._buffer[:call].removesuffix('\n'))
      return self._go(StreamParser._calling, self._buffer[call + len(TOOL_CALL) :])
    ready = len(self._buffer) - _waiting(self._buffer, _CONTENT_WAITS)
    self._say(self._buffer[:ready])
    self._buffer = self._buffer[ready:]
    return False

  def _calling(self) -> bool:
    end = self._find(TOOL_CALL_END)
    if end < 0:
      return False
    self._block(self._buffer[:end])
    return self._go(StreamParser._called, self._buffer[end + len(TOOL_CALL_END) :])

  def _called(self) -> bool:
    call = self._find(TOOL_CALL)
    if call < 0:
      return False
    if self._buffer[:call].strip():
      self._break(Status.MALFORMED_STRUCTURE, self._buffer[:call])
    return self._go(StreamParser._calling, self._buffer[call + len(TOOL_CALL) :])

  def _done(self) -> bool:
    if self._buffer:
      raise ValueError('StreamParser.feed after finish: start a new parser')
    return False

  def _block(self, block: str) -> None:
    invokes, junk = _elements(block, 'invoke')
    if junk or not invokes:
      self._break(Status.MALFORMED_STRUCTURE, junk or block)
    for name, body in invokes:
      parameters, junk = _elements(body, 'parameter')
      if junk or not name:
        self._break(Status.MALFORMED_STRUCTURE, body, name)
        continue
      schemas = self._schemas.get(name, {})
      values, status = {}, Status.OK
      for key, value in parameters:
        values[key], fits = arguments.typed(value.strip(), schemas.get(key))
        if not fits:
          status = Status.INVALID_JSON
      self._verdict(status)
      call = ToolCall(name, values, status, body)
      self._calls.append(call)
      self._out.append(Delta('tool_call', call=call))

  def _think(self, text: str) -> None:
    if text:
      self._reasoning.append(text)
      self._out.append(Delta('reasoning_content', text))

  def _say(self, text: str) -> None:
    if text:
      self._content.append(text)
      self._out.append(Delta('content', text))

  def _break(self, status: Status, raw: str, name: str = '') -> None:
    self._verdict(status)
    self._broken.append(ToolCall(name, {}, status, raw))

  def _verdict(self, status: Status) -> None:
    self._status = max(self._status, status, key=_SEVERITY.__getitem__)


def _waiting(text: str, waits: frozenset[str]) -> int:
  """Length of the longest end of the text that must wait."""
  tail = text[-_LONGEST_WAIT:]
  for start in range(len(tail)):
    if tail[start] in '\n<[' and tail[start:] in waits:
      return len(tail) - start
  return 0


def _elements(text: str, tag: str) -> tuple[list[tuple[str, str]], str]:
  """`<tag name="…">body</tag>` as (name, body), and what else stands there, stripped.

  Linear in the text, whatever it holds. A name may be unquoted, as in the guide.
  """
  opening, closing = f'<{tag} name=', f'</{tag}>'
  found, junk, at = [], [], 0
  while (start := text.find(opening, at)) >= 0:
    name_end = text.find('>', start)
    end = text.find(closing, name_end) if name_end >= 0 else -1
    if end < 0:
      break
    junk.append(text[at:start].strip())
    name = text[start + len(opening) : name_end].strip().strip('"\'')
    found.append((name, text[name_end + 1 : end]))
    at = end + len(closing)
  junk.append(text[at:].strip())
  return found, ''.join(junk)
