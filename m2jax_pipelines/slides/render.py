"""Slides as images: LibreOffice writes a PDF, `pdftoppm` one PNG a page."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

INSTALL = 'apt-get install libreoffice-impress-nogui poppler-utils'


def unavailable() -> str:
  """'' if slides can be rendered here, or what to install."""
  missing = [name for name in ('soffice', 'pdftoppm') if not shutil.which(name)]
  return f'no {" or ".join(missing)}: {INSTALL}' if missing else ''


def render(
  deck: Path, target: Path, *, dpi: int = 50, timeout_s: float = 60
) -> list[Path]:
  """Renders a deck that `guard` let through; returns the pages' PNG files.

  Raises:
    RuntimeError: a program is missing.
    CalledProcessError, TimeoutExpired: the deck could not be rendered.
  """
  if reason := unavailable():
    raise RuntimeError(reason)
  target.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as place:
    profile = f'-env:UserInstallation=file://{place}/profile'
    command = [
      'soffice',
      profile,
      '--headless',
      '--convert-to',
      'pdf',
      '--outdir',
      place,
    ]
    options = dict(check=True, capture_output=True, timeout=timeout_s)
    subprocess.run([*command, str(deck)], **options)
    pdf = Path(place) / f'{deck.stem}.pdf'
    subprocess.run(
      ['pdftoppm', '-png', '-r', str(dpi), str(pdf), str(target / 'page')], **options
    )
  return sorted(target.glob('page*.png'))
