"""The terminal of a command: all that it writes is `printable`.

A terminal obeys control characters: text of a model, a tool, a dataset or an HTTP peer
could set the clipboard or hide lines. Every command calls `install`
(`experiments.common.run`): then what is printed, logged or raised is safe, whoever
wrote it. What rich draws goes through `Console` or `progress`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TextIO

import rich.console
import rich.progress
import rich.text
from absl import logging
from rich.segment import Segment

from m2jax.observe.printable import printable


class Stream:
  """A text stream that writes `printable` text; otherwise the stream itself.

  Attributes:
    rich_proxied_file: the stream, which a rich console writes to.
  """

  def __init__(self, stream: TextIO):
    self.rich_proxied_file = stream

  def write(self, text: str) -> int:
    self.rich_proxied_file.write(printable(text))
    return len(text)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.rich_proxied_file, name)


class Console(rich.console.Console):
  """A rich console whose styles are its caller's only: text has no markup or links."""

  def __init__(self, **options: Any):
    given = {'file': sys.stdout, 'markup': False, 'highlight': False, **options}
    super().__init__(**given)

  def render_str(self, text: str, **options: Any) -> rich.text.Text:
    return super().render_str(printable(text), **options)

  def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
    for text, style, control in super().render(*arguments, **options):
      # What is not a `str`: a caller's Text, or a line that is printed beside a bar.
      if style and style.link:
        style = style.update_link()
      yield Segment(text if control else printable(text), style, control)


def progress(*columns: Any, **options: Any) -> rich.progress.Progress:
  """A progress bar, beside which lines may be printed."""
  return rich.progress.Progress(*columns, console=Console(), **options)


class _Formatter(logging.PythonFormatter):
  def format(self, record) -> str:
    return printable(super().format(record))


def install() -> None:
  """Makes what this process prints and logs printable."""
  for name in ('stdout', 'stderr'):
    stream = getattr(sys, name)
    if not isinstance(stream, Stream):
      setattr(sys, name, Stream(stream))
  logging.get_absl_handler().setFormatter(_Formatter())
