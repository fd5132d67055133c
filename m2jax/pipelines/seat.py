"""A model's seat in a pipeline: any OpenAI-compatible URL, or a scripted author.

Each call is appended to `calls.jsonl` with its role and with `training: false`; no
dataset or pool reads that file, so that the calls of authors and judges are never
trained. A record of a task says who wrote it: `Text.by`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from absl import logging

SCRIPTED = 'scripted'


@dataclasses.dataclass(frozen=True)
class SeatConfig:
  """Attributes:
  url: base URL of an OpenAI-compatible server, `…/v1`; '' is the scripted author.
  model: its name there.
  key_variable: environment variable that holds the API key.
  timeout_s: of a call.
  temperature: of sampling.
  """

  url: str = ''
  model: str = ''
  key_variable: str = 'OPENAI_API_KEY'
  timeout_s: float = 120.0
  temperature: float = 0.7


@dataclasses.dataclass(frozen=True)
class Text:
  """A text and its author: 'scripted', or the model's name."""

  text: str
  by: str


class Seat:
  """Writes texts for one role, such as 'author' or 'judge'."""

  def __init__(self, config: SeatConfig, role: str, log: Path | None = None):
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
    """The model's text, or the scripted one if there is no model or it is no use.

    Args:
      messages: the OpenAI chat.
      scripted: the text without a model.
      accept: whether a model's text can be used.
    """
    if not self._config.url:
      return Text(scripted(), SCRIPTED)
    try:
      text = await self._call(messages)
    except (httpx.HTTPError, LookupError, ValueError, TypeError) as error:
      logging.warning('%s: %s: %r', self._config.url, self.role, error)
      text = ''
    used = bool(accept(text))
    self._record(messages, text, used)
    return Text(text, self._config.model) if used else Text(scripted(), SCRIPTED)

  async def _call(self, messages) -> str:
    key = os.environ.get(self._config.key_variable, 'none')
    body = {
      'model': self._config.model,
      'messages': list(messages),
      'temperature': self._config.temperature,
    }
    async with httpx.AsyncClient(timeout=self._config.timeout_s) as client:
      answer = await client.post(
        f'{self._config.url.rstrip("/")}/chat/completions',
        json=body,
        headers={'Authorization': f'Bearer {key}'},
      )
    answer.raise_for_status()
    text = answer.json()['choices'][0]['message']['content'] or ''
    if not isinstance(text, str):
      raise TypeError(f'content is a {type(text).__name__}')
    return text

  def _record(self, messages, text: str, used: bool) -> None:
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
    }
    with open(self._log, 'a', encoding='utf-8') as file:
      file.write(json.dumps(row, ensure_ascii=False) + '\n')
