"""Names in a source that reach the verifier: the first of the guards (guards.py).

It finds what is written, not what is computed. Standard library only: the file is
copied into each task.
"""

import ast

# Names that a solution has no reason to begin to use: they reach the verifier.
_REACHES = frozenset(
  'pytest _pytest unittest pluggy conftest doctest gc ctypes builtins atexit signal '
  '_getframe currentframe f_back f_globals f_locals f_code __code__ settrace '
  'setprofile monitoring addaudithook meta_path path_hooks path_importer_cache '
  'modules _exit '
  'execv execve fork forkpty kill killpg ptrace __subclasses__ get_objects '
  'get_referrers sitecustomize usercustomize PYTEST_CURRENT_TEST argv exc_info '
  'environ getenv putenv SystemExit SkipTest exit quit'.split()
)
_TEXTS = ('pytest', 'PYTEST', 'conftest', 'reward', 'M2JAX', '/verifier', '/proc/')


def reaches(source):
  """Names and texts of a source that reach the verifier."""
  found = names(source) & _REACHES
  try:
    nodes = list(ast.walk(ast.parse(source)))
  except (SyntaxError, ValueError, RecursionError):
    return found
  for node in nodes:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      found |= {f'text {t!r}' for t in _TEXTS if t in node.value}
    if isinstance(node, ast.FunctionDef) and node.name in ('__eq__', '__ne__'):
      body = [n for n in node.body if not isinstance(n, ast.Expr)]
      if len(body) == 1 and isinstance(body[0], ast.Return):
        if isinstance(body[0].value, ast.Constant):
          found.add(f'{node.name} that is constant')
  return found


def names(source):
  """Identifiers of a source: names, attributes, imports."""
  try:
    nodes = list(ast.walk(ast.parse(source)))
  except (SyntaxError, ValueError, RecursionError):
    return set()
  found = set()
  for node in nodes:
    if isinstance(node, ast.Name):
      found.add(node.id)
    elif isinstance(node, ast.Attribute):
      found.add(node.attr)
    elif isinstance(node, ast.Import | ast.ImportFrom):
      found.update(p for a in node.names for p in a.name.split('.'))
      found.update((getattr(node, 'module', None) or '').split('.'))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      found.update(w for w in (node.value,) if w in _REACHES)
  return found
