"""Parses M2's responses into reasoning, content, typed tool calls and a status.

Source: facts/m2-and-forge.md §2.2. The input follows the generation prompt
`]~b]ai\\n<think>\\n`. Only special tokens are markup: the same characters as plain
tokens, such as a tool call quoted from a file, are text. Reasoning and content lose
only the newlines that the template writes, so that parsing inverts rendering;
parameters are typed by the tool's schema, strings verbatim (`arguments`); `invokes`
determines where a value ends. Unlike in vLLM, which returns whatever it finds, calls
with a broken structure are separate. All of the model's text is returned: text after a
call is content, and unreadable calls are in `Message.call_text`.

`parse` and streaming use the same incremental parser, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from m2jax.text import arguments, invokes
from m2jax.text.markup import (
  EOS,
  SPECIAL_TOKENS,
  THINK_END,
  TOOL_CALL,
  TOOL_CALL_END,
)


class Status(enum.StrEnum):
  """Status of a call or of a response, from best to worst; a response has its worst.

  OK: well formed.
  INVALID_JSON: an argument does not match its declared type; returned as text.
  MALFORMED_STRUCTURE: a block without an `<invoke>`, text where only elements are
    allowed, or text after the calls.
  UNCLOSED_BLOCK: `<minimax:tool_call>` is never closed.
  UNCLOSED_THINKING: there is no `</think>`; a tool call ends the thinking, or nothing.
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
  """A call: arguments typed by the schema; `raw` is the generated text."""

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
    content: text for the user, before and after the calls.
    reasoning: text before `</think>`.
    tool_calls: calls to execute, with status OK or INVALID_JSON.
    status: the worst in the response.
    broken_calls: calls that cannot be executed and text after calls, in `raw`.
    call_text: the markup of blocks and calls that cannot be executed, as generated.
  """

  content: str = ''
  reasoning: str = ''
  tool_calls: tuple[ToolCall, ...] = ()
  status: Status = Status.OK
  broken_calls: tuple[ToolCall, ...] = ()
  call_text: str = dataclasses.field(default='', compare=False)

  @property
  def shown(self) -> str:
    """What is neither reasoning nor a call: the content, then `call_text`."""
    return '\n'.join(filter(None, (self.content, self.call_text)))

  def to_openai(self) -> dict[str, Any]:
    """The message as an OpenAI dict; calls without text have `content` None."""
    out: dict[str, Any] = {
      'role': 'assistant',
      'content': self.shown or (None if self.tool_calls else ''),
      'reasoning_content': self.reasoning,
    }
    if self.tool_calls:
      out['tool_calls'] = [call.to_openai() for call in self.tool_calls]
    return out


class Delta(NamedTuple):
  """A step of a stream.

  `kind` is 'reasoning_content' or 'content', with `text`, or 'tool_call', with a
  complete `call`.
  """

  kind: str
  text: str = ''
  call: ToolCall | None = None


class Piece(NamedTuple):
  """The text of plain tokens, or of one special token."""

  text: str
  special: bool = False


def parse(
  generated: str | Iterable[Piece],
  tools: Sequence[Mapping[str, Any]] | None = None,
  version: str = 'm2',
) -> Message:
  """Parses what the model generated after `]~b]ai\\n<think>\\n`.

  Args:
    generated: the pieces of the generated ids (`tokenizer.Detokenizer`), with or
      without the final `[e~[`; or a trusted text, in which the text of a special token
      counts as the token.
    tools: OpenAI tool dicts; undeclared parameters stay strings.
    version: the template's version, one of `invokes.VERSIONS`: where a value ends.

  Raises no error for any text: `Message.status` reports what is wrong.
  """
  parser = StreamParser(tools, version)
  parser.feed(pieces(generated) if isinstance(generated, str) else generated)
  parser.finish()
  return parser.message


def pieces(text: str) -> list[Piece]:
  """Splits a trusted text at its special tokens."""
  # The pattern has one group, so every second part is a special token.
  parts = enumerate(_SPECIAL.split(text))
  return [Piece(part, i % 2 == 1) for i, part in parts if part]


_SPECIAL = re.compile('(' + '|'.join(map(re.escape, SPECIAL_TOKENS)) + ')')


class StreamParser:
  """Incremental `parse`; the result does not depend on how plain text is split.

  `feed` and `finish` return the deltas to send; `message` is complete after `finish`. A
  call is sent as soon as no later text can change it: when the next one begins, or when
  its block closes. A newline that may belong to markup is held back.
  """

  def __init__(
    self, tools: Sequence[Mapping[str, Any]] | None = None, version: str = 'm2'
  ):
    if version not in invokes.VERSIONS:
      raise ValueError(f'version {version!r}: must be one of {invokes.VERSIONS}')
    self._version = version
    self._schemas = arguments.parameter_schemas(tools)
    # Cached by parameter: a schema may be large, and calls may repeat parameters.
    self._types: dict[tuple[str, str], frozenset[str]] = {}
    self._state = StreamParser._thinking
    self._eos_pending = False  # the last piece was `[e~[`
    self._newline = ''  # a last newline that may belong to the markup after it
    self._newlines_to_skip = 2  # the template's blank line after </think>
    self._deferred: list[Piece] = []  # from a tool call inside the thinking onwards
    self._block = invokes.Block(version)  # the open block
    self._block_reads = False  # one of its calls could be read
    self._block_unread: list[str] = []  # its text that belongs to no such call
    self._after: list[str] = []  # text after the last block
    self._reasoning: list[str] = []
    self._content: list[str] = []
    self._unread: list[str] = []
    self._calls: list[ToolCall] = []
    self._broken: list[ToolCall] = []
    self._status = Status.OK
    self._out: list[Delta] = []

  @property
  def message(self) -> Message:
    """The message parsed so far."""
    return Message(
      content=''.join(self._content),
      reasoning=''.join(self._reasoning),
      tool_calls=tuple(self._calls),
      status=self._status,
      broken_calls=tuple(self._broken),
      call_text='\n'.join(self._unread),
    )

  def feed(self, generated: Iterable[Piece]) -> list[Delta]:
    """Parses the next pieces of the response."""
    for piece in generated:
      if self._state is StreamParser._done:
        raise ValueError('StreamParser.feed after finish: start a new parser')
      if not piece.text:
        continue
      if self._eos_pending:  # it was not the last piece, so it is text
        self._state(self, Piece(EOS))
      self._eos_pending = piece == _END
      if not self._eos_pending:
        self._state(self, piece)
    return self._take()

  def finish(self) -> list[Delta]:
    """Ends the response: drops a final `[e~[` and resolves what was held back."""
    if self._state is StreamParser._thinking:
      self._verdict(Status.UNCLOSED_THINKING)
      if self._deferred:
        # A call without </think> before it ends the thinking.
        self._newline, self._newlines_to_skip = '', 0
        self._state = StreamParser._answering
        for piece in self._deferred:
          self._state(self, piece)
      else:
        self._think(self._newline)
    if self._state is StreamParser._answering:
      self._say(self._newline)
    elif self._state is StreamParser._calling:
      self._end_block(closed=False)
    elif self._state is StreamParser._called:
      self._say(self._newline)
      self._check_after_calls()
    self._state = StreamParser._done
    return self._take()

  def _take(self) -> list[Delta]:
    out, self._out = self._out, []
    return out

  # States. Each consumes one piece.

  def _thinking(self, piece: Piece) -> None:
    if piece == _THINK_END:
      self._think(
        (self._newline + ''.join(p.text for p in self._deferred)).removesuffix('\n')
      )
      self._newline = ''
      self._state = StreamParser._answering
    elif self._deferred or piece == _TOOL_CALL:
      # Markup before </think> is reasoning, so that a call must wait for the end.
      self._deferred.append(piece)
    else:
      self._think(self._without_newline(piece.text))

  def _answering(self, piece: Piece) -> None:
    if piece == _TOOL_CALL:
      self._start_block()
      return
    text = piece.text
    while self._newlines_to_skip and text:
      if text[0] != '\n':
        self._newlines_to_skip = 0
        break
      text = text[1:]
      self._newlines_to_skip -= 1
    self._say(self._without_newline(text))

  def _calling(self, piece: Piece) -> None:
    if piece == _TOOL_CALL_END:
      self._end_block(closed=True)
      self._state = StreamParser._called
    else:
      self._read(self._block.feed(piece.text))

  def _called(self, piece: Piece) -> None:
    if piece == _TOOL_CALL:
      self._check_after_calls()
      self._start_block()
      return
    text = piece.text
    if not self._after:
      text = text.lstrip()  # between blocks, white space is the template's
      if text and self._content:
        self._newline = '\n'
    if text:
      self._after.append(text)
      self._say(self._without_newline(text))

  def _done(self, piece: Piece) -> None:
    """Never called: `feed` raises an error first."""

  def _without_newline(self, text: str) -> str:
    """Text to send: the newline held back, and the text without a last newline."""
    if not text:
      return ''
    text = self._newline + text
    self._newline = '\n' if text.endswith('\n') else ''
    return text.removesuffix('\n')

  def _check_after_calls(self) -> None:
    if self._after:
      self._break(Status.MALFORMED_STRUCTURE, ''.join(self._after))
      self._after.clear()

  def _start_block(self) -> None:
    self._newline = ''
    self._block = invokes.Block(self._version)
    self._block_reads = False
    self._block_unread.clear()
    self._state = StreamParser._calling

  def _end_block(self, *, closed: bool) -> None:
    found, rest = self._block.end(closed=closed)
    self._read(found)
    text = self._block.text
    if not closed:
      self._break(Status.UNCLOSED_BLOCK, rest)
      self._block_unread.append(rest)
    elif not self._block_reads and not self._block_unread:
      self._break(Status.MALFORMED_STRUCTURE, text)  # an empty block
    if not self._block_reads:
      self._unread.append(TOOL_CALL + text + (TOOL_CALL_END if closed else ''))
    else:
      self._unread += self._block_unread

  def _read(self, found: Iterable[invokes.Element | str]) -> None:
    """Reads the elements of a block."""
    for element in found:
      call = invokes.read(element, self._version)
      if call is None:
        if isinstance(element, str):
          name, body, raw = '', element, element
        else:
          name, body, raw = element.name, element.body, element.raw
        self._break(Status.MALFORMED_STRUCTURE, body, name)
        self._block_unread.append(raw)
        continue
      assert not isinstance(element, str)  # text is no call
      name, parameters = call
      values, status = {}, Status.OK
      for key, value in parameters:
        values[key], fits = arguments.typed(value, self._types_of(name, key))
        if not fits:
          status = Status.INVALID_JSON
      self._verdict(status)
      self._calls.append(ToolCall(name, values, status, element.body))
      self._out.append(Delta('tool_call', call=self._calls[-1]))
      self._block_reads = True

  def _types_of(self, name: str, key: str) -> frozenset[str]:
    if (name, key) not in self._types:
      properties, root = self._schemas.get(name, ({}, {}))
      self._types[name, key] = arguments.types(properties.get(key), root)
    return self._types[name, key]

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


_END = Piece(EOS, special=True)
_THINK_END = Piece(THINK_END, special=True)
_TOOL_CALL = Piece(TOOL_CALL, special=True)
_TOOL_CALL_END = Piece(TOOL_CALL_END, special=True)
