"""The pages of MiniWoB++ that are tasks here, and where their files are.

They need only reading, clicking and typing: nothing has to be seen, dragged or drawn.
MiniWoB++ 1.1.0 (MIT, https://miniwob.farama.org; Liu et al. 2018, arXiv:1802.08802); of
the package only the HTML is used, and nothing of it is imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

VERSION = '1.1.0'
INSTALL = f'pip install --no-deps miniwob=={VERSION}'


class Family(NamedTuple):
  """A page.

  Attributes:
    calls: tool calls that a solution needs; the least if it depends on the seed.
    most: the most that it needs for any seed.
  """

  calls: int
  most: int


FAMILIES: Mapping[str, Family] = {
  'choose-list': Family(2, 2),
  'click-button': Family(1, 1),
  'click-button-sequence': Family(2, 2),
  'click-checkboxes': Family(1, 7),
  'click-checkboxes-large': Family(1, 13),
  'click-collapsible': Family(2, 2),
  'click-collapsible-2': Family(2, 4),
  'click-dialog': Family(1, 1),
  'click-dialog-2': Family(1, 1),
  'click-link': Family(1, 1),
  'click-option': Family(2, 2),
  'click-scroll-list': Family(2, 3),
  'click-tab': Family(1, 1),
  'click-tab-2': Family(1, 3),
  'click-test': Family(1, 1),
  'click-test-2': Family(1, 1),
  'click-widget': Family(1, 1),
  'enter-password': Family(3, 3),
  'enter-text': Family(2, 2),
  'enter-text-2': Family(2, 2),
  'enter-text-dynamic': Family(2, 2),
  'focus-text': Family(1, 1),
  'focus-text-2': Family(1, 1),
  'login-user': Family(3, 3),
  'login-user-popup': Family(3, 5),
  'multi-orderings': Family(4, 4),
  'navigate-tree': Family(1, 8),
  'odd-or-even': Family(4, 4),
  'read-table': Family(2, 2),
  'read-table-2': Family(3, 3),
  'simple-arithmetic': Family(2, 2),
}
# Held out whole: longer than any page of training, and with an interruption.
HELD_OUT = ('click-checkboxes-large', 'login-user-popup')


@functools.cache
def root() -> Path:
  """Directory of MiniWoB's HTML.

  Raises:
    ValueError: the package is not installed, or of another version, whose pages differ.
  """
  found = importlib.util.find_spec('miniwob')  # finds, does not import
  if found is None or not found.submodule_search_locations:
    raise ValueError(f'miniwob is not installed: {INSTALL}')
  version = importlib.metadata.version('miniwob')
  if version != VERSION:
    raise ValueError(f'miniwob {version} is installed, and its pages differ: {INSTALL}')
  return Path(found.submodule_search_locations[0]) / 'html'
