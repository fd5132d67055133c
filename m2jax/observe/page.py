"""The frame of a self-contained page: templates, style sheet, security policy."""

from __future__ import annotations

import base64
import functools
import hashlib
import pathlib
import time
from typing import Any

import jinja2
from markupsafe import Markup

from m2jax.observe.printable import printable

_TEMPLATES = pathlib.Path(__file__).parent / 'templates'


def render(name: str, **values: Any) -> str:
  """A template with `values`, the report's style sheet, and `written`, the time.

  All text passes `printable` and is escaped.
  """
  style = asset('report.css')
  return template(name).render(
    written=time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime()),
    style=Markup(style),
    style_hash=csp_hash(style),
    **values,
  )


def asset(name: str) -> str:
  """Text of a file beside the templates."""
  return (_TEMPLATES / name).read_text(encoding='utf-8')


@functools.cache
def template(name: str) -> jinja2.Template:
  """A template of this package."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    trim_blocks=True,
    lstrip_blocks=True,
  )
  return environment.get_template(name)


def csp_hash(text: str) -> Markup:
  """The source expression of an inline style or script, for the security policy."""
  digest = hashlib.sha256(text.encode()).digest()
  return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")
