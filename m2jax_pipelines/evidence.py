"""Evidence of verifiers: texts and screenshots of a verdict, kept beside the dataset.

A verifier may put `evidence` into details.json: file name → text, or base64 for .png.
That of a solution is written to DATASET/evidence/TASK/ and shown in report.html.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

DIRECTORY = 'evidence'
_NAME = re.compile(r'[a-z0-9-]{1,40}\.(png|txt)')
_PNG = b'\x89PNG\r\n\x1a\n'


def save(dataset: Path, task: str, evidence: Mapping[str, str]) -> None:
  """Writes the files of a task; what is not text or a PNG image is omitted."""
  place = dataset / DIRECTORY / task
  for name, value in evidence.items():
    if not _NAME.fullmatch(str(name)) or not isinstance(value, str):
      continue
    data = _image(value) if name.endswith('.png') else value.encode(errors='replace')
    if data is not None:
      place.mkdir(parents=True, exist_ok=True)
      (place / name).write_bytes(data)


def _image(value: str) -> bytes | None:
  try:
    data = base64.b64decode(value, validate=True)
  except (binascii.Error, ValueError):
    return None
  return data if data.startswith(_PNG) else None


def texts(dataset: Path, task: str) -> dict[str, str]:
  """Texts of a task's evidence by name."""
  found = sorted((dataset / DIRECTORY / task).glob('*.txt'))
  return {path.stem: path.read_text('utf-8', 'replace') for path in found}


def images(dataset: Path, task: str) -> dict[str, Markup]:
  """Screenshots of a task's evidence by name, as data URLs."""
  found = {}
  for path in sorted((dataset / DIRECTORY / task).glob('*.png')):
    data = base64.b64encode(path.read_bytes()).decode()
    found[path.stem] = Markup(f'data:image/png;base64,{data}')
  return found
