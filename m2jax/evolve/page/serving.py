"""The evolution page on a server, and as a file.

  GET /view                               the page; nothing of the lineage is in it
  GET /view/api/evolution?after=&identity=     `Source.page`
  GET /view/api/round/N                   `Source.round`
  GET /view/api/final                     `Source.final`

`viewer.guard` says who may ask.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib

import fastapi

from m2jax.evolve.page.source import Source
from m2jax.gateway.errors import invalid
from m2jax.viewer import export, page, serving
from m2jax.viewer.guard import Guard, integer, known

FILE_NAME = 'evolution.html'
PARTS = page.Parts(
  'evolution',
  ('view.css', 'evolution.css'),
  ('data.js', 'place.js', 'frame.js')
  + ('scores.js', 'lineage.js', 'round.js', 'evolution.js'),
)
_CHUNK = 50  # rounds of one element of a file
_FILE_CHARACTERS = 64 << 20  # of rounds in a file; beyond it only those of keeps
_IDENTITY_CHARACTERS = 64


def served(
  source: Source, key: str, port: int = 0
) -> contextlib.AbstractContextManager[str]:
  """Serves the page of a record on loopback; see `viewer.serving.listening`."""
  return serving.listening(functools.partial(_add_routes, source, key), key, port)


def _add_routes(source: Source, key: str, app: fastapi.FastAPI, host: str) -> None:
  guard = Guard(key, host)
  guard.add_page(app, page.live(PARTS))

  @app.get('/view/api/evolution')
  async def evolution(request: fastapi.Request):
    guard.check(request)
    given = known(request.query_params, {'after', 'identity'})
    after = integer(given.get('after', '0'), 'after')
    if len(identity := given.get('identity', '')) > _IDENTITY_CHARACTERS:
      raise invalid(f'longer than {_IDENTITY_CHARACTERS} characters', 'identity')
    return await guard.answer(functools.partial(source.page, after, identity))

  @app.get('/view/api/round/{number}')
  async def of_round(request: fastapi.Request, number: str):
    guard.check(request)
    index = integer(number, 'round')
    return await guard.answer(functools.partial(source.round, index))

  @app.get('/view/api/final')
  async def final(request: fastapi.Request):
    guard.check(request)
    return await guard.answer(source.final)


def write(source: Source, path: str | os.PathLike) -> int:
  """Writes the page as one file; replaces an old one only when it is complete.

  Returns the number of bytes. Raises OSError if it cannot be written.
  """
  path = pathlib.Path(path)
  found = source.page()
  while found['reading'] < 1:
    found = source.page()
  html = page.exported(source.title, PARTS)
  kept, characters = {0, *found['keeps']}, 0
  temporary = path.with_name(path.name + '.new')
  with open(temporary, 'w', encoding='utf-8') as out:
    index = found | {'per_chunk': _CHUNK, 'final': source.final()}
    out.write(html.head + export.element('index', index) + html.script)
    for first in range(0, len(found['rows']), _CHUNK):
      chunk = {}
      for number in range(first, min(first + _CHUNK, len(found['rows']))):
        if characters < _FILE_CHARACTERS or number in kept:
          chunk[number] = source.round(number)
          characters += len(json.dumps(chunk[number]))
      out.write(export.element(f'rounds-{first // _CHUNK}', chunk))
    out.write(page.TAIL)
    size = out.tell()
  os.replace(temporary, path)
  return size
