"""Which pipelines there are: modules of this package with `Config` and `candidates`,
and the entry points of other distributions in its group, `m2jax_pipelines`.

A pipeline that needs programs may define `unavailable() -> str`: why it cannot run here
and how to install what is missing, or ''.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from importlib import metadata
from pathlib import Path

from m2jax import kinds


def names() -> list[str]:
  """Names of the pipelines, sorted; nothing is imported that may be missing."""
  found = []
  for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
    origin = importlib.util.find_spec(f'{__package__}.{module.name}').origin
    text = Path(origin).read_text(encoding='utf-8')
    if '\nasync def candidates(' in text and 'class Config(' in text + _config(origin):
      found.append(module.name)
  return sorted({*found, *metadata.entry_points(group=__package__).names})


def unavailable(name: str) -> str:
  """Why a pipeline cannot run on this machine; '' if it can.

  Raises:
    ValueError: there is no such pipeline.
  """
  try:
    module = kinds.module(__package__, name)
  except ImportError as error:
    return f'{error}: pip install -e ./m2jax_pipelines'
  return getattr(module, 'unavailable', lambda: '')()


def _config(origin: str) -> str:
  path = Path(origin).with_name('config.py')
  inside = Path(origin).name == '__init__.py' and path.exists()
  return path.read_text(encoding='utf-8') if inside else ''
