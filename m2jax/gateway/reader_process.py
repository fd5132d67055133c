"""The process in which large requests are read: parsed, checked and encoded.

JSON and tokenizer hold Python's lock while they work, so in the gateway's own process a
large request would stop the event loop and the engine. Here it stops nobody, runs at a
low priority, and a limit on the address space bounds what it can take.

The parent sends pickled frames on stdin, first a Setup, then one of Read and Encode at
a time, and gets one back for each: ('ok', value), ('refused', ApiError) or ('failed',
text). Started by `readers`; it ends with its stdin.
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

import numpy as np
import tokenizers

from m2jax.gateway import prompts, protocol
from m2jax.gateway.errors import ApiError, too_large
from m2jax.text.tokenizer import Tokenizer

_LENGTH = struct.Struct('<Q')
_NICE = 5
# Of a tokenizer that does not know: of large vocabularies, a line of blanks or dashes.
_LONGEST_TOKEN_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Setup:
  """What a reader works with.

  Attributes:
    tokenizer: the tokenizer as JSON (`Tokenizer.to_json`).
    context_tokens: what the engine's context holds.
    memory_bytes: most address space beyond what the process has before its first
      request.
  """

  tokenizer: str
  context_tokens: int
  memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Read:
  """Asks for the ChatRequest of a body, which the reader remembers."""

  body: bytearray


@dataclasses.dataclass(frozen=True)
class Encode:
  """Asks for the token ids of a part of the request read last."""

  part: prompts.Part


def send(stream: BinaryIO, value: Any) -> None:
  """Writes one frame."""
  data = pickle.dumps(value, protocol=5)
  stream.write(_LENGTH.pack(len(data)))
  stream.write(data)
  stream.flush()


def receive(stream: BinaryIO) -> Any:
  """Reads one frame. Raises EOFError when the other side is gone."""
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
    self._context_tokens = setup.context_tokens
    self._request: protocol.ChatRequest | None = None
    self._messages: list[dict] = []

  def answer(self, command: Read | Encode) -> protocol.ChatRequest | np.ndarray:
    if isinstance(command, Encode):
      tools = self._request.tools
      return prompts.encode(self._messages, tools, command.part, self._tokenizer)
    self._request, self._messages = protocol.parse_request(command.body)
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
  os.dup2(2, 1)  # whatever prints must not end up between frames
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
        reply = 'refused', error
      except MemoryError:
        reply = 'refused', too_large('reading the request takes too much memory')
      except EOFError:
        raise
      except Exception as error:
        reply = 'failed', f'{type(error).__name__}: {error}'
      send(stdout, reply)
      del reply


if __name__ == '__main__':
  main()
  sys.stderr.flush()
