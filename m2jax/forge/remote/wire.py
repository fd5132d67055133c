"""Requests and results of the rollout engine as bytes, checked when they are read.

A document is a little-endian uint32, the length of a JSON header of that many bytes,
and arrays one after the other, whose types and shapes follow from the header:

  request   {"id", "sampling"}, int32 prompt ids
  result    {"finish_reason", "tokens", "experts", "top"}, int32 response ids, float32
            log-probabilities, int32 versions; int16 expert ids of the shape "experts";
            int32 and float32 [tokens, top] of the likeliest tokens
  tokens    {"tokens", "top"}, new response ids: the same arrays without versions
  pages     {"epoch", "next", "events"}, int8 kinds of events, int64 versions, and a
            digest of each

A response is a stream of frames: one byte for the kind, a little-endian uint32 for the
number of bytes, and these bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

from m2jax.forge.remote.page_log import Pages
from m2jax.rollout.api import (
  GenerateRequest,
  GenerateResult,
  NewTokens,
  PageEvent,
  SamplingParams,
)
from m2jax.rollout.tiers import page_chain

# Kinds of frames: new tokens, the result, an error (JSON), and a sign of life.
TOKENS, RESULT, ERROR, ALIVE = b'T', b'R', b'E', b'A'
MAX_HEADER_BYTES = 64 << 10
MAX_ID_CHARACTERS = 64

_EVENTS = ('stored', 'evicted', 'cleared')
_LENGTH, _FRAME = struct.Struct('<I'), struct.Struct('<cI')
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams)}


class Malformed(ValueError):
  """The bytes are not what this module writes; the message names the field."""


def request_limit(context_tokens: int) -> int:
  """Bytes of the largest request to an engine of that context."""
  return _LENGTH.size + MAX_HEADER_BYTES + 4 * context_tokens


def encode_request(id_: str, request: GenerateRequest) -> bytes:
  """A request as a document; `id_` is by which it is cancelled."""
  header = {'id': id_, 'sampling': dataclasses.asdict(request.sampling)}
  prompt = np.asarray(request.prompt_ids, '<i4')
  return _document(header, [prompt])


def decode_request(data: bytes) -> tuple[str, GenerateRequest]:
  """The inverse; values that only the engine can judge are not checked.

  Raises:
    Malformed: names the field.
  """
  header, body = _split(data)
  if not isinstance(header, dict) or header.keys() != {'id', 'sampling'}:
    raise Malformed('the header must have id and sampling')
  id_, sampling = header['id'], header['sampling']
  if not isinstance(id_, str) or not 0 < len(id_) <= MAX_ID_CHARACTERS:
    raise Malformed(f'id: must be a string of 1 to {MAX_ID_CHARACTERS} characters')
  if len(body) % 4:
    raise Malformed('prompt_ids: must be int32')
  return id_, GenerateRequest(np.frombuffer(body, '<i4'), _sampling(sampling))


def encode_result(result: GenerateResult) -> bytes:
  """A result as a document."""
  experts, top = result.experts, result.top_ids
  header = {
    'finish_reason': result.finish_reason,
    'tokens': len(result.tokens),
    'experts': None if experts is None else experts.shape,
    'top': None if top is None else top.shape[1],
    'cached_tokens': result.cached_tokens,
  }
  arrays = [
    np.asarray(result.tokens, '<i4'),
    np.asarray(result.logprobs, '<f4'),
    np.asarray(result.versions, '<i4'),
  ]
  if experts is not None:
    arrays.append(np.asarray(experts, '<i2'))
  if top is not None:
    arrays += [np.asarray(top, '<i4'), np.asarray(result.top_logprobs, '<f4')]
  return _document(header, arrays)


def decode_result(data: bytes) -> GenerateResult:
  """The inverse. Raises Malformed."""
  header, body = _split(data)
  try:
    tokens, experts, top = header['tokens'], header['experts'], header['top']
    shapes = [('<i4', (tokens,)), ('<f4', (tokens,)), ('<i4', (tokens,))]
    if experts is not None:
      shapes.append(('<i2', tuple(experts)))
    if top is not None:
      shapes += [('<i4', (tokens, top)), ('<f4', (tokens, top))]
    arrays = _arrays(body, shapes)
    rest = iter(arrays[3:])
    return GenerateResult(
      *arrays[:3],
      finish_reason=header['finish_reason'],
      experts=None if experts is None else next(rest),
      top_ids=None if top is None else next(rest),
      top_logprobs=None if top is None else next(rest),
      cached_tokens=header['cached_tokens'],
    )
  except (KeyError, TypeError) as error:
    raise Malformed(f'not a result: {error!r}') from error


def encode_tokens(tokens: NewTokens) -> bytes:
  """The payload of a TOKENS frame."""
  top = tokens.top_ids
  header = {'tokens': len(tokens), 'top': None if top is None else top.shape[1]}
  arrays = [np.asarray(tokens, '<i4'), np.asarray(tokens.logprobs, '<f4')]
  if top is not None:
    arrays += [np.asarray(top, '<i4'), np.asarray(tokens.top_logprobs, '<f4')]
  return _document(header, arrays)


def decode_tokens(payload: bytes) -> NewTokens:
  """The inverse. Raises Malformed."""
  header, body = _split(payload)
  try:
    tokens, top = header['tokens'], header['top']
    shapes = [('<i4', (tokens,)), ('<f4', (tokens,))]
    if top is not None:
      shapes += [('<i4', (tokens, top)), ('<f4', (tokens, top))]
    ids, *rest = _arrays(body, shapes)
  except (KeyError, TypeError) as error:
    raise Malformed(f'not new tokens: {error!r}') from error
  return NewTokens(ids.tolist(), *rest)


def encode_pages(pages: Pages) -> bytes:
  """Changes of an engine's cached pages as a document."""
  events, size = pages.events, page_chain.DIGEST_BYTES
  header = {'epoch': pages.epoch, 'next': pages.next, 'events': len(events)}
  kinds = np.array([_EVENTS.index(event.kind) for event in events], '<i1')
  versions = np.array([event.version for event in events], '<i8')
  digests = b''.join(event.digest.ljust(size, b'\0') for event in events)
  return _document(header, [kinds, versions, np.frombuffer(digests, np.uint8)])


def decode_pages(data: bytes) -> Pages:
  """The inverse. Raises Malformed."""
  header, body = _split(data)
  try:
    epoch, after, n = header['epoch'], header['next'], header['events']
    shapes = [('<i1', (n,)), ('<i8', (n,)), ('u1', (n, page_chain.DIGEST_BYTES))]
    kinds, versions, digests = _arrays(body, shapes)
    return Pages(epoch, after, list(map(_event, kinds, versions.tolist(), digests)))
  except (KeyError, TypeError, IndexError) as error:
    raise Malformed(f'not changes of pages: {error!r}') from error


def _event(kind: int, version: int, digest: np.ndarray) -> PageEvent:
  if (name := _EVENTS[kind]) == 'cleared':
    return PageEvent(name)
  return PageEvent(name, digest.tobytes(), version)


def frame(kind: bytes, payload: bytes = b'') -> bytes:
  """One frame of a response."""
  return _FRAME.pack(kind, len(payload)) + payload


async def frames(
  chunks: AsyncIterator[bytes], limit_bytes: int
) -> AsyncIterator[tuple[bytes, bytes]]:
  """(kind, payload) of the frames in a stream of bytes.

  Raises:
    Malformed: a frame is larger than the limit, or the stream ends within one.
  """
  buffer = bytearray()
  async for chunk in chunks:
    buffer += chunk
    for kind, payload in _complete(buffer, limit_bytes):
      yield kind, payload
  if buffer:
    raise Malformed('the stream ended within a frame')


def _complete(buffer: bytearray, limit_bytes: int) -> Iterator[tuple[bytes, bytes]]:
  """Removes the complete frames from the buffer."""
  start = 0
  while len(buffer) - start >= _FRAME.size:
    kind, size = _FRAME.unpack_from(buffer, start)
    if size > limit_bytes:
      raise Malformed(f'a frame of {size} bytes: the limit is {limit_bytes}')
    end = start + _FRAME.size + size
    if len(buffer) < end:
      break
    yield kind, bytes(buffer[start + _FRAME.size : end])
    start = end
  del buffer[:start]


def _document(header: Any, arrays: list[np.ndarray]) -> bytes:
  text = json.dumps(header).encode()
  return b''.join([_LENGTH.pack(len(text)), text, *(a.tobytes() for a in arrays)])


def _arrays(body: memoryview, shapes: list[tuple[str, tuple]]) -> list[np.ndarray]:
  """The arrays of a document, by type and shape. Raises Malformed, TypeError."""
  sizes = [np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in shapes]
  if sum(sizes) != len(body):
    raise Malformed(f'the arrays have {len(body)} bytes, the header {sum(sizes)}')
  arrays, offset = [], 0
  for (dtype, shape), size in zip(shapes, sizes, strict=True):
    array = np.frombuffer(body, dtype, math.prod(shape), offset)
    arrays.append(array.reshape(shape))
    offset += size
  return arrays


def _split(data: bytes) -> tuple[Any, memoryview]:
  if len(data) < _LENGTH.size:
    raise Malformed('the header is missing')
  (length,) = _LENGTH.unpack_from(data)
  if length > MAX_HEADER_BYTES or length > len(data) - _LENGTH.size:
    raise Malformed(f'the header has {length} bytes: more than there are, or allowed')
  end = _LENGTH.size + length
  try:
    header = json.loads(bytes(data[_LENGTH.size : end]))
  except (ValueError, RecursionError) as error:
    raise Malformed(f'the header is not JSON: {error}') from error
  return header, memoryview(data)[end:]


def _sampling(fields: Any) -> SamplingParams:
  """Checks types only: ranges are the engine's to check."""
  if not isinstance(fields, dict) or 'max_tokens' not in fields:
    raise Malformed('sampling: must be an object with max_tokens')
  if unknown := sorted(set(fields) - set(_DEFAULTS)):
    raise Malformed(f'sampling: has no field {unknown[0][:100]!r}')
  values = dict(fields)
  for name, value in fields.items():
    path, default = f'sampling.{name}', _DEFAULTS[name]
    if name == 'logit_bias':
      values[name] = tuple(_pair(path, pair) for pair in _list(path, value))
    elif name == 'stop_ids':
      values[name] = tuple(_number(path, x, (int,)) for x in _list(path, value))
    elif name == 'seed' and value is None:
      continue
    else:
      kinds = (int, float) if isinstance(default, float) else (int,)
      values[name] = _number(path, value, kinds)
  return SamplingParams(**values)


def _pair(path: str, pair: Any) -> tuple[int, float]:
  if len(_list(path, pair)) != 2:
    raise Malformed(f'{path}: must be pairs of a token id and a number')
  return _number(path, pair[0], (int,)), _number(path, pair[1], (int, float))


def _list(path: str, value: Any) -> list:
  if not isinstance(value, list):
    raise Malformed(f'{path}: must be a list')
  return value


def _number(path: str, value: Any, kinds: tuple[type, ...]) -> Any:
  if isinstance(value, bool) or not isinstance(value, kinds) or abs(value) >= 2**64:
    raise Malformed(f'{path}: must be {"a number" if float in kinds else "an integer"}')
  return value
