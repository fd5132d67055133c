"""For `make docs`: entries of docstrings for several names, 'a, b: text', stay one.

Griffe reads such an entry as a name and its type.
"""

import re

import griffe


class SeveralNames(griffe.Extension):
  """Joins the names with spaces that do not break."""

  def on_object(self, *, obj, **_) -> None:
    if obj.docstring:
      obj.docstring.value = re.sub(
        r'(?m)^ +\w+(, \w+)+(?=: )',
        lambda entry: entry[0].replace(', ', ',\u00a0'),
        obj.docstring.value,
      )
