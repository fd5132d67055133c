"""LLM clients of pipelines: any OpenAI-compatible URL, or a scripted author.

Each call is appended to `calls.jsonl` with its role and with `training: false`; no
dataset or pool reads that file, so calls of authors and judges are never trained. A
task's record names its author: `Text.by`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from absl import logging

from m2jax.tasks import harbor

SCRIPTED = 'scripted'
_MAX_BYTES = 1 << 20  # of an answer
_RETRY_S = 1.0  # before the first retry; doubles with each
_PASSING = (408, 429, 500, 502, 503, 504)  # transient statuses, which are retried
# Thinking that a server leaves in the text.
_THINKING = re.compile(r'.*</think(?:ing)?>\s*', re.S)
_FENCED = re.compile(r'```\w*\n((?:(?!```).)*)\n```', re.S)
_NO_TEXT = re.compile('[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffd]|<think(?:ing)?>')
# In its first sentence; not in JSON.
_REFUSAL = re.compile(
  r"(?![{\[])[^.!?\n]{0,80}?(?:\b(?:I['’]m|I am)(?: \w+)? sorry,? (?:but|I)\b"
  r"|\bI(?:['’]m| am)? (?:can['’]?t|can ?not|won['’]t|will not|unable|not able|decline)"
  r'(?: to)? (?:\w+ )?(?:help|assist|comply|fulfil|do|provide|produce|write|rewrite'
  r'|create|generate|answer|discuss)\b|\bas an AI\b|\bagainst my \w+)'
  r'|很?抱歉|对不起',
  re.I,
)


class NoAnswer(harbor.InvalidVerdict):
  """A model did not answer, or its answer is unusable (law 5)."""


@dataclasses.dataclass(frozen=True)
class LLMConfig:
  """Attributes:
  url: base URL of an OpenAI-compatible server, `…/v1`; '' is the scripted author.
  model: its name there.
  key_variable: environment variable that holds the API key.
  timeout_s: timeout of a call.
  temperature: sampling temperature.
  retries: further attempts after a connection failure, a timeout, a malformed answer,
    or an HTTP 408, 429 or 5xx.
  """

  url: str = ''
  model: str = ''
  key_variable: str = 'OPENAI_API_KEY'
  timeout_s: float = 120.0
  temperature: float = 0.7
  retries: int = 3


@dataclasses.dataclass(frozen=True)
class Text:
  """A text and its author: 'scripted', or the model's name."""

  text: str
  by: str


class LLMClient:
  """Writes texts for one role, such as 'author' or 'judge'."""

  def __init__(self, config: LLMConfig, role: str, log: Path | None = None):
    self._config, self.role, self._log = config, role, log

  @property
  def has_model(self) -> bool:
    """Whether a model is asked."""
    return bool(self._config.url)

  async def write(
    self,
    messages: Sequence[Mapping[str, str]],
    scripted: Callable[[], str],
    accept: Callable[[str], object] = bool,
  ) -> Text:
    """The model's text; the scripted one if there is no model or its text is unusable.

    Args:
      messages: the OpenAI chat.
      scripted: makes the text without a model.
      accept: whether a model's text is usable; it gets '' after a refusal or a cut-off.

    Raises:
      NoAnswer: the server did not answer, retries included.
    """
    if not self._config.url:
      return Text(scripted(), SCRIPTED)
    try:
      choice = await self._call(messages)
    except NoAnswer as error:
      logging.warning('%s', error)
      self._record(messages, '', False, error=str(error))
      raise
    text = said(choice)
    used = bool(accept(text))
    self._record(messages, choice['message'].get('content'), used)
    return Text(text, self._config.model) if used else Text(scripted(), SCRIPTED)

  async def _call(self, messages) -> Mapping[str, Any]:
    """The choice of the server, with its message."""
    config = self._config
    for attempt in range(config.retries + 1):
      if attempt:
        await asyncio.sleep(_RETRY_S * 2 ** (attempt - 1))
      try:
        async with asyncio.timeout(config.timeout_s):
          return await self._post(messages)
      except httpx.HTTPStatusError as error:
        failure = f'HTTP {error.response.status_code}'
        if error.response.status_code not in _PASSING:
          break
      except (
        *(TimeoutError, httpx.HTTPError, httpx.InvalidURL),
        *(LookupError, ValueError, TypeError, RecursionError),
      ) as error:
        failure = repr(error)[:200]
    raise NoAnswer(f'{self.role} {config.model!r} at {config.url}: {failure}')

  async def _post(self, messages) -> Mapping[str, Any]:
    key = os.environ.get(self._config.key_variable, 'none')
    body = {
      'model': self._config.model,
      'messages': list(messages),
      'temperature': self._config.temperature,
    }
    data = b''
    async with (
      httpx.AsyncClient(timeout=self._config.timeout_s) as client,
      client.stream(
        'POST',
        f'{self._config.url.rstrip("/")}/chat/completions',
        json=body,
        headers={'Authorization': f'Bearer {key}'},
      ) as answer,
    ):
      answer.raise_for_status()
      async for part in answer.aiter_bytes():
        data += part
        if len(data) > _MAX_BYTES:
          return {'message': {'content': ''}}
    choice = json.loads(data)['choices'][0]
    if not isinstance(choice['message'], dict):
      raise TypeError(f'message is a {type(choice["message"]).__name__}')
    return choice

  def _record(self, messages, text: Any, used: bool, **more: Any) -> None:
    if self._log is None:
      return
    row: dict[str, Any] = {
      'time': time.time(),
      'role': self.role,
      'model': self._config.model,
      'training': False,
      'messages': list(messages),
      'text': text,
      'used': used,
      **more,
    }
    with open(self._log, 'a', encoding='utf-8') as file:
      file.write(json.dumps(row) + '\n')


def said(choice: Mapping[str, Any]) -> str:
  """A model's answer, without its thinking or a fence around all of it.

  '' if it refuses, if its text was cut off, or if it has control characters.
  """
  message = choice['message']
  text = message.get('content')
  if isinstance(text, list):
    parts = [p for p in text if isinstance(p, dict) and p.get('type') == 'text']
    text = ''.join(str(part.get('text')) for part in parts)
  ended = choice.get('finish_reason') not in ('length', 'content_filter')
  if not isinstance(text, str) or message.get('refusal') or not ended:
    return ''
  text = _THINKING.sub('', text)
  if fenced := _FENCED.fullmatch(text.strip()):
    text = fenced[1]
  return '' if _NO_TEXT.search(text) or _REFUSAL.match(text.lstrip()) else text
