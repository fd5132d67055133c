"""Draws the packages of m2jax and what each imports, as docs/design.md §3 shows it.

  python -m tests.import_graph [m2jax.rollout …]
  python -m tests.import_graph --write   # into docs/design.md

One line a package, from those that everything imports to those that nothing does. An
import is left out if another one on the line implies it.
"""

from __future__ import annotations

import graphlib
import pathlib
import sys
from collections.abc import Iterable

import grimp

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'design.md'
MARK = '<!-- tests.import_graph -->\n'
ROOTS = ('m2jax', 'm2jax_pipelines', 'experiments')


def imports(package: str = '') -> dict[str, set[str]]:
  """Package or module directly below `package` → those of them that it imports.

  Args:
    package: '' is m2jax, with the distributions beside it.
  """
  graph = grimp.build_graph(*(r for r in ROOTS if grimp_finds(r)))
  parents = {package} if package else {'m2jax'}
  tops = set().union(*(graph.find_children(parent) for parent in parents))
  tops = {name for name in tops if not name.endswith('.__main__')}  # programs
  if not package:
    tops |= {root for root in ROOTS[1:] if root in graph.modules}

  def top(module: str) -> str | None:
    parts = module.split('.')
    names = ('.'.join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((name for name in names if name in tops), None)

  found: dict[str, set[str]] = {name: set() for name in tops}
  for module in graph.modules:
    importer = top(module)
    for other in graph.find_modules_directly_imported_by(module):
      imported = top(other)
      if importer and imported and importer != imported:
        found[importer].add(imported)
  return found


def grimp_finds(root: str) -> bool:
  """Whether the package is there."""
  try:
    __import__(root)
  except ModuleNotFoundError:
    return False
  return True


def reduced(found: dict[str, set[str]]) -> dict[str, set[str]]:
  """Without the imports that others imply."""

  def below(names: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    left = list(names)
    while left:
      for name in found[left.pop()] - seen:
        seen.add(name)
        left.append(name)
    return seen

  return {name: direct - below(direct) for name, direct in found.items()}


def draw(package: str = '') -> str:
  """The lines; raises graphlib.CycleError if packages import each other."""
  found = imports(package)
  order = list(graphlib.TopologicalSorter(found).static_order())  # has no cycle
  graph = reduced(found)
  depth: dict[str, int] = {}
  for name in order:
    depth[name] = 1 + max((depth[other] for other in graph[name]), default=-1)
  prefix = (package or 'm2jax') + '.'
  order = sorted(graph, key=lambda name: (depth[name], name))
  width = max(len(name.removeprefix(prefix)) for name in order)
  lines = []
  for name in order:
    others = sorted(graph[name], key=lambda other: (-depth[other], other))
    arrow = ' → ' + ', '.join(o.removeprefix(prefix) for o in others) if others else ''
    lines.append(f'{name.removeprefix(prefix):<{width}}{arrow}'.rstrip())
  return '\n'.join(lines)


def written(text: str, drawn: str) -> str:
  """The page with the drawing in its place."""
  before, mark, after = text.partition(MARK)
  rest = after.partition('```\n')[2].partition('```\n')[2]
  return f'{before}{mark}```\n{drawn}\n```\n{rest}'


if __name__ == '__main__':
  if sys.argv[1:] == ['--write']:
    PAGE.write_text(written(PAGE.read_text(), draw()))
    sys.exit()
  for package in sys.argv[1:] or ['']:
    try:
      print(draw(package))
    except graphlib.CycleError as error:
      _, cycle = error.args  # each is imported by the next
      sys.exit(f'{package or "m2jax"}: imports in a circle: {" → ".join(cycle[::-1])}')
