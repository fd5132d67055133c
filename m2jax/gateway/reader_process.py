"""A process that parses, checks and encodes large requests.

JSON and tokenizer hold Python's global lock, so that a large request in the gateway's
process would block the event loop and the engine. A separate process does not block
them, runs at a low priority, and has a limit on its address space.

The parent sends pickled frames on stdin, first a Setup, then one Read, Encode or
Compile at a time, and receives a frame for each: ('ok', value), ('rejected', ApiError)
or ('failed', text). `readers` starts the process, which exits when its stdin is closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import resource
import struct
import sys
from typing import Any, BinaryIO

import tokenizers

from m2jax.gateway import dialects, formats, prompts, protocol
from m2jax.gateway.errors import ApiError, too_large
from m2jax.text import chat
from m2jax.text.tokenizer import Tokenizer

_LENGTH = struct.Struct('<Q')
_NICE = 5
# If the tokenizer has no bound. Large vocabularies have lines of blanks or dashes.
_LONGEST_TOKEN_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Setup:
  """Settings of a reader.

  Attributes:
    tokenizer: the tokenizer as JSON (`Tokenizer.to_json`).
    context_tokens: size of the engine's context.
    memory_bytes: maximum address space in addition to that of the process before its
      first request.
    template: template of prompts.
  """

  tokenizer: str
  context_tokens: int
  memory_bytes: int
  template: chat.Template


@dataclasses.dataclass(frozen=True)
class Read:
  """Requests the ChatRequest of a body, which the reader keeps.

  Attributes:
    dialect: name of the body's dialect.
  """

  body: bytearray
  dialect: str


@dataclasses.dataclass(frozen=True)
class Encode:
  """Requests the token ids of a part of the latest request."""

  part: prompts.Part


@dataclasses.dataclass(frozen=True)
class Compile:
  """Compiles a format, and returns nothing: whether it can be done in time."""

  format: formats.Format
  calls: bool


def send(stream: BinaryIO, value: Any) -> None:
  """Writes one frame."""
  data = pickle.dumps(value, protocol=5)
  stream.write(_LENGTH.pack(len(data)))
  stream.write(data)
  stream.flush()


def receive(stream: BinaryIO) -> Any:
  """Reads one frame. Raises EOFError if the other side has closed the stream."""
  head = stream.read(_LENGTH.size)
  if len(head) < _LENGTH.size:
    raise EOFError
  (size,) = _LENGTH.unpack(head)
  data = stream.read(size)
  if len(data) < size:
    raise EOFError
  return pickle.loads(data)


class _Reader:
  def __init__(self, setup: Setup):
    self._tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(setup.tokenizer))
    self._context_tokens, self._template = setup.context_tokens, setup.template
    self._request: protocol.ChatRequest | None = None
    self._messages: list[dict] = []
    self._formats = formats.Formats(self._tokenizer)

  def answer(self, command: Read | Encode | Compile) -> Any:
    if isinstance(command, Compile):
      self._formats.compile(command.format, command.calls)
      return None
    if isinstance(command, Encode):
      tools, part = self._request.tools, command.part
      encoding = self._tokenizer, self._template
      return prompts.encode(self._messages, tools, part, *encoding)
    self._request, self._messages = dialects.parse(command.body, command.dialect)
    protocol.check_count(
      self._messages,
      self._request,
      self._context_tokens,
      self._tokenizer.longest_token_bytes or _LONGEST_TOKEN_BYTES,
    )
    return self._request


def _address_space_bytes() -> int:
  with open('/proc/self/statm', 'rb') as statm:
    return int(statm.read().split()[0]) * resource.getpagesize()


def main():
  """Serves the parent until it closes the pipe."""
  stdin = os.fdopen(os.dup(0), 'rb')
  stdout = os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)  # printed text must not go between the frames
  setup = receive(stdin)
  reader = _Reader(setup)
  limit = _address_space_bytes() + setup.memory_bytes
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  os.nice(_NICE)
  send(stdout, ('ok', None))
  with contextlib.suppress(EOFError, BrokenPipeError):
    while True:
      try:
        reply = 'ok', reader.answer(receive(stdin))
      except ApiError as error:
        reply = 'rejected', error
      except MemoryError:
        message = 'reading the request takes more than read_memory_bytes: send less'
        reply = 'rejected', too_large(message)
      except EOFError:
        raise
      except Exception as error:
        reply = 'failed', f'{type(error).__name__}: {error}'
      send(stdout, reply)
      del reply


if __name__ == '__main__':
  main()
  sys.stderr.flush()
