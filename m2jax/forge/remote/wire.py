"""Requests and results of the rollout engine as frames (`m2jax.frames`).

A request is one frame, `generate`. The response is a stream of them: `tokens` as they
are drawn, `alive` as a sign of life, and at last `result` or `error`. Changes of the
cached pages are one frame, `pages`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from m2jax import frames
from m2jax.forge.remote.page_log import Pages
from m2jax.frames import Frame, Malformed
from m2jax.rollout.api import (
  GenerateRequest,
  GenerateResult,
  NewTokens,
  PageEvent,
  SamplingParams,
)
from m2jax.rollout.tiers import page_chain

MAX_ID_CHARACTERS = 64

_EVENTS = ('stored', 'evicted', 'cleared')
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams)}


def request_limit(context_tokens: int) -> int:
  """Bytes of the largest request to an engine of that context."""
  return frames.PREFIX_BYTES + frames.MAX_HEADER_BYTES + 4 * context_tokens


def encode_request(id_: str, request: GenerateRequest) -> bytes:
  """A request; `id_` is by which it is cancelled."""
  prompt = np.asarray(request.prompt_ids, np.int32)
  sampling = dataclasses.asdict(request.sampling)
  return frames.pack('generate', dict(prompt_ids=prompt), id=id_, sampling=sampling)


def decode_request(data: bytes) -> tuple[str, GenerateRequest]:
  """The inverse; values that only the engine can judge are not checked.

  Raises:
    Malformed: names the field.
  """
  frame = frames.decode(data)
  if frame.kind != 'generate' or frame.fields.keys() != {'id', 'sampling'}:
    raise Malformed('a request must be generate, with id and sampling')
  id_ = frame.fields['id']
  if not isinstance(id_, str) or not 0 < len(id_) <= MAX_ID_CHARACTERS:
    raise frame.wrong('id', f'a string of 1 to {MAX_ID_CHARACTERS} characters')
  prompt = frame.array('prompt_ids', np.int32, (None,))
  return id_, GenerateRequest(prompt, _sampling(frame.fields['sampling']))


def encode_result(result: GenerateResult) -> bytes:
  """A result."""
  return frames.pack(
    'result',
    dict(
      tokens=np.asarray(result.tokens, np.int32),
      versions=np.asarray(result.versions, np.int32),
      **_likelihoods(result),
      **_given(experts=(result.experts, np.int16)),
    ),
    finish_reason=result.finish_reason,
    cached_tokens=result.cached_tokens,
  )


def decode_result(frame: Frame) -> GenerateResult:
  """The inverse. Raises Malformed."""
  tokens = frame.array('tokens', np.int32, (None,))
  cached = frame.fields.get('cached_tokens')
  return GenerateResult(
    tokens,
    versions=frame.array('versions', np.int32, tokens.shape),
    finish_reason=frame.text('finish_reason'),
    experts=frame.array('experts', np.int16, (None, None, None), optional=True),
    cached_tokens=None if cached is None else frame.integer('cached_tokens'),
    **_read_likelihoods(frame, len(tokens)),
  )


def encode_tokens(tokens: NewTokens) -> bytes:
  """New tokens."""
  arrays = dict(tokens=np.asarray(tokens, np.int32), **_likelihoods(tokens))
  return frames.pack('tokens', arrays)


def decode_tokens(frame: Frame) -> NewTokens:
  """The inverse. Raises Malformed."""
  tokens = frame.array('tokens', np.int32, (None,)).tolist()
  return NewTokens(tokens, **_read_likelihoods(frame, len(tokens)))


def _likelihoods(of: GenerateResult | NewTokens) -> dict[str, np.ndarray]:
  logprobs = dict(logprobs=np.asarray(of.logprobs, np.float32))
  top = (of.top_ids, np.int32), (of.top_logprobs, np.float32)
  return logprobs | _given(top_ids=top[0], top_logprobs=top[1])


def _given(**arrays: tuple[np.ndarray | None, Any]) -> dict[str, np.ndarray]:
  given = {name: pair for name, pair in arrays.items() if pair[0] is not None}
  return {name: np.asarray(array, dtype) for name, (array, dtype) in given.items()}


def _read_likelihoods(frame: Frame, n: int) -> dict[str, np.ndarray | None]:
  top = frame.array('top_ids', np.int32, (n, None), optional=True)
  found = dict(logprobs=frame.array('logprobs', np.float32, (n,)), top_ids=top)
  if top is not None:
    found['top_logprobs'] = frame.array('top_logprobs', np.float32, top.shape)
  return found


def encode_pages(pages: Pages) -> bytes:
  """Changes of an engine's cached pages."""
  events, size = pages.events, page_chain.DIGEST_BYTES
  digests = b''.join(event.digest.ljust(size, b'\0') for event in events)
  arrays = dict(
    kinds=np.array([_EVENTS.index(event.kind) for event in events], np.int8),
    versions=np.array([event.version for event in events], np.int64),
    digests=np.frombuffer(digests, np.uint8).reshape(-1, size),
  )
  return frames.pack('pages', arrays, epoch=pages.epoch, next=pages.next)


def decode_pages(data: bytes) -> Pages:
  """The inverse. Raises Malformed."""
  frame = frames.decode(data)
  kinds = frame.array('kinds', np.int8, (None,), (0, len(_EVENTS)))
  versions = frame.array('versions', np.int64, kinds.shape)
  digests = frame.array('digests', np.uint8, (len(kinds), page_chain.DIGEST_BYTES))
  events = list(map(_event, kinds, versions.tolist(), digests))
  return Pages(frame.text('epoch'), frame.integer('next'), events)


def _event(kind: int, version: int, digest: np.ndarray) -> PageEvent:
  if (name := _EVENTS[kind]) == 'cleared':
    return PageEvent(name)
  return PageEvent(name, digest.tobytes(), version)


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
