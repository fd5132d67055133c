"""Sources on which a written test is tried: right, with the bug, and a third.

Standard library only: the file is copied into each task.
"""

import ast
import secrets


def source(texts, name):
  """The source of a variant: of its kind's text, or `printed` anew."""
  kind, _, how = name.partition(' ')
  return printed(texts[kind]) if how else texts[kind]


def printed(text):
  """A source with the same behaviour, worded differently each time."""
  tree = ast.parse(text)
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      name = ast.Name(f'_{secrets.token_hex(4)}', ast.Store())
      extra = ast.Assign([name], ast.Constant(secrets.randbelow(1000)))
      node.body.insert(ast.get_docstring(node) is not None, extra)
  return ast.unparse(ast.fix_missing_locations(tree)) + '\n'


def order(rng):
  """The variants in the order in which they are run, two of them again.

  A test that goes by what earlier runs left (files, process ids) would have to guess.
  """
  once = ['right', 'right printed', 'bug', 'bug printed']
  drawn = [*once, rng.choice(once), rng.choice(once), 'third']
  rng.shuffle(drawn)
  return drawn
