"""One answer of a model behind any OpenAI- or Anthropic-compatible URL.

POST URL/chat/completions (OpenAI) or URL/messages (Anthropic, version 2023-06-01); both
URLs end in /v1. The answer is untrusted text of bounded size. Redirects and proxies of
the environment are not followed: the key goes to the host that the user named.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from m2jax.checks import require

APIS = 'openai', 'anthropic'
_MAX_BYTES = 1 << 20  # of an answer
_RETRY_S = 1.0  # before the first retry; doubles with each
_PASSING = (408, 429, 500, 502, 503, 504, 529)  # statuses that are retried
_THINKING = re.compile(r'.*</think(?:ing)?>', re.S)  # that a server leaves in the text
_FENCED = re.compile(r'```\w*\n(.*)\n```', re.S)


class NoAnswer(RuntimeError):
  """The model did not answer, or not with text."""

  repeatable = True


@dataclasses.dataclass(frozen=True)
class ChatModel:
  """A model to ask.

  Attributes:
    url: base URL, `…/v1`.
    model: its name there.
    api: one of `APIS`.
    key_variable: environment variable that has the API key; unset: no key is sent.
    max_tokens: limit of an answer.
    temperature: sampling temperature; None is the server's default.
    timeout_s: time of one attempt, from the request to the end of the answer.
    retries: further attempts after a connection failure, a timeout, or an HTTP 408, 429
      or 5xx.
  """

  url: str
  model: str
  api: str = 'openai'
  key_variable: str = 'OPENAI_API_KEY'
  max_tokens: int = 8192
  temperature: float | None = None
  timeout_s: float = 300.0
  retries: int = 2

  def __post_init__(self):
    parts = urllib.parse.urlsplit(self.url)
    known = parts.scheme in ('http', 'https') and bool(parts.hostname)
    require(self, known, 'url', 'a URL such as http://HOST:PORT/v1')
    require(self, self.api in APIS, 'api', f'one of {APIS}')
    require(self, bool(self.model), 'model', 'the name of a model')

  def ask(self, system: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The answer's text, without thinking or a fence around all of it.

    Args:
      system: the instructions.
      messages: `role` ('user' or 'assistant') and `content` of each.

    Raises:
      NoAnswer: the server failed, retries included, or sent something else.
    """
    return _text(self.complete(messages, system)[0])

  def complete(
    self, messages: Sequence[Mapping[str, str]], system: str = ''
  ) -> tuple[Any, int]:
    """The answer's content as the server sent it, and the tokens that it counted.

    Raises:
      NoAnswer: see `ask`.
    """
    for attempt in range(self.retries + 1):
      if attempt:
        time.sleep(_RETRY_S * 2 ** (attempt - 1))
      try:
        status, data = self._post(system, messages)
      except httpx.HTTPError as error:
        failure = f'{type(error).__name__}: {error}'[:200]
        continue
      if status == 200:
        return self._content(data)
      failure = f'HTTP {status}'  # the server's text may repeat the key
      if status not in _PASSING:
        break
    raise NoAnswer(f'{self.model} at {self.url}: {failure}')

  def _post(self, system: str, messages) -> tuple[int, bytes]:
    body: dict[str, Any] = {'model': self.model, 'max_tokens': self.max_tokens}
    if self.temperature is not None:
      body['temperature'] = self.temperature
    key = os.environ.get(self.key_variable, '')
    if self.api == 'anthropic':
      path, body = 'messages', body | {'system': system, 'messages': list(messages)}
      headers = {'anthropic-version': '2023-06-01'} | (
        {'x-api-key': key} if key else {}
      )
    else:
      path = 'chat/completions'
      first = [{'role': 'system', 'content': system}] if system else []
      body['messages'] = [*first, *messages]
      headers = {'authorization': f'Bearer {key}'} if key else {}
    url, data = f'{self.url.rstrip("/")}/{path}', bytearray()
    ends_s = time.monotonic() + self.timeout_s
    with (
      httpx.Client(timeout=self.timeout_s, trust_env=False) as client,
      client.stream('POST', url, json=body, headers=headers) as answer,
    ):
      for part in answer.iter_bytes():
        data += part
        if len(data) > _MAX_BYTES:
          raise NoAnswer(f'{self.model} at {url}: more than {_MAX_BYTES:,} bytes')
        if time.monotonic() > ends_s:
          raise httpx.ReadTimeout(f'not complete after {self.timeout_s:g} s')
      return answer.status_code, bytes(data)

  def _content(self, data: bytes) -> tuple[Any, int]:
    try:
      found = json.loads(data)
      usage = found.get('usage') or {}
      kinds = ('input_tokens', 'output_tokens', 'total_tokens')  # of the two APIs
      tokens = sum(int(usage.get(kind) or 0) for kind in kinds)
      if self.api == 'anthropic':
        texts = [p['text'] for p in found['content'] if p.get('type') == 'text']
        return ''.join(texts), tokens
      return found['choices'][0]['message']['content'], tokens
    except (
      *(ValueError, LookupError, TypeError, AttributeError, RecursionError),
    ) as error:
      raise NoAnswer(f'{self.model} at {self.url}: no {self.api} answer') from error


def _text(content: Any) -> str:
  if not isinstance(content, str):
    raise NoAnswer(f'the answer has a {type(content).__name__} in place of a text')
  text = _THINKING.sub('', content).strip()
  fenced = _FENCED.fullmatch(text)
  return fenced[1] if fenced else text
