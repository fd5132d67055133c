"""Photographs the report of a run in Chromium, as the README shows it.

python -m experiments.forge --config=configs/forge.py:smoke --workdir=workdir/smoke
python -m tests.screenshot workdir/smoke/report.html docs/images/report.png
"""

from __future__ import annotations

import argparse
import pathlib
import shutil

from playwright.sync_api import sync_playwright


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('page', type=pathlib.Path)
  parser.add_argument('image', type=pathlib.Path)
  parser.add_argument('--width', type=int, default=1100)
  parser.add_argument('--height', type=int, default=1425)
  args = parser.parse_args()
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=shutil.which('chromium'), args=['--no-sandbox']
    )
    tab = browser.new_page(viewport={'width': args.width, 'height': args.height})
    tab.goto(args.page.resolve().as_uri())
    args.image.parent.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=args.image)
    browser.close()


if __name__ == '__main__':
  main()
