"""The page as one HTML text: style, scripts and, in an export, the run's data inline.

The scripts are plain files that share one scope, in the order of `Parts`; there is
no build step. The content security policy allows exactly this script and this style and
no external host. What comes from a trajectory reaches the document only as text nodes
(`htm` and `preact`, whose licences are in static/vendor).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import pathlib
from typing import NamedTuple

from markupsafe import escape

STATIC = pathlib.Path(__file__).parent / 'static'
_VENDOR = 'vendor/htm-preact.umd.js'


class Parts(NamedTuple):
  """What a page is made of.

  Attributes:
    name: what it shows, for its title. styles, scripts: files of `STATIC`, in order.
  """

  name: str
  styles: tuple[str, ...]
  scripts: tuple[str, ...]


TRAJECTORIES = Parts(
  'trajectories',
  ('view.css',),
  (
    'data.js', 'place.js', 'frame.js', 'color.js', 'tokens.js', 'transcript.js',
    'timeline.js', 'tree.js', 'list.js', 'histogram.js', 'curves.js', 'members.js',
    'compare.js', 'app.js',
  ),
)  # fmt: skip


class Html(NamedTuple):
  """The parts of a page, and its content security policy as a header.

  Attributes:
    head: until the script. script: the element. policy: of the header.
  """

  head: str
  script: str
  policy: str

  @property
  def text(self) -> str:
    """The whole page, without data."""
    return self.head + self.script + TAIL


TAIL = '</body></html>'


@functools.cache
def _files(parts: Parts) -> tuple[str, str]:
  """The style and the script."""
  style, joined = (
    '\n'.join((STATIC / name).read_text(encoding='utf-8') for name in names)
    for names in (parts.styles, parts.scripts)
  )
  vendor = (STATIC / _VENDOR).read_text(encoding='utf-8')
  script = f'{vendor}\n(() => {{\n"use strict";\n{joined}\n}})();'
  if '</script' in script.lower():
    raise ValueError('viewer: a script contains </script')
  return style, script


def live(parts: Parts = TRAJECTORIES) -> Html:
  """The page of a server, which asks the API for everything."""
  return _page(parts, "'self'", 'm2jax')


def exported(title: str, parts: Parts = TRAJECTORIES) -> Html:
  """The page as a file: the index goes before its script, other data behind it."""
  return _page(parts, "'none'", title)


def _page(parts: Parts, connect: str, title: str) -> Html:
  style, script = _files(parts)
  policy = (
    f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
    f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
  )
  head = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)} · {parts.name}</title>
<style>{style}</style></head>
<body><div id="app"><header class="bar"><h1>{escape(title)}</h1></header></div>
"""
  return Html(head, f'<script>{script}</script>\n', policy + "; frame-ancestors 'none'")


def _hash(text: str) -> str:
  digest = hashlib.sha256(text.encode()).digest()
  return f'sha256-{base64.b64encode(digest).decode()}'
