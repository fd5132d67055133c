"""The scaffolds of a lineage as a git repository, WORKDIR/scaffolds.git.

Each round has a worktree, WORKDIR/rounds/N, on its parent's commit. refs/nodes/N are
the nodes that were evaluated, refs/heads/main is the incumbent. The record decides:
`Trees.repair` makes the repository follow it after a kill, and commits are the same
each time, since author, dates and files are.

git runs without hooks, the user's settings, and the environment's GIT_* variables.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Mapping

from m2jax.evolve.scaffold import Scaffold

_TIMEOUT_S = 60.0
_FIXED = ('core.hooksPath=/dev/null', 'gc.auto=0', 'safe.directory=*')
_PERSON = {
  f'GIT_{role}_{key}': value
  for role in ('AUTHOR', 'COMMITTER')
  for key, value in (('NAME', 'm2jax'), ('EMAIL', 'evolve@m2jax.invalid'))
}


class GitFailed(RuntimeError):
  """A git command failed; the message has what it printed."""


class Trees:
  """The repository of one workdir."""

  def __init__(self, workdir: pathlib.Path):
    """Opens or creates the repository, without worktrees that a kill left."""
    self._repository = workdir.absolute() / 'scaffolds.git'
    self._rounds = workdir.absolute() / 'rounds'
    if (self._repository / 'HEAD').exists():
      shutil.rmtree(self._rounds, ignore_errors=True)
    else:
      self._repository.mkdir(parents=True, exist_ok=True)
      self._git('init', '-q', '--bare', '-b', 'main', '.')
    for lock in self._repository.rglob('*.lock'):  # of a git that was killed
      lock.unlink(missing_ok=True)
    self._git('worktree', 'prune', '--expire=now')

  def open(self, node: int, parent: int | None) -> pathlib.Path:
    """A worktree for a candidate, on its parent's commit."""
    folder = self._rounds / str(node)
    self.close(node)
    if parent is None:
      empty = self._git('hash-object', '-t', 'tree', '-w', '--stdin')
      commit = self._commit(empty, None, -1, 'An empty scaffold')
    else:
      commit = f'refs/nodes/{parent}'
    self._git('worktree', 'add', '-q', '--detach', str(folder), commit)
    return folder

  def commit(self, node: int, message: str) -> str:
    """Commits a worktree's files; returns the commit."""
    folder = self._rounds / str(node)
    self._git('add', '-A', cwd=folder)
    tree = self._git('write-tree', cwd=folder)
    parent = self._git('rev-parse', 'HEAD', cwd=folder)
    return self._commit(tree, parent, node, message)

  def keep(self, node: int, commit: str) -> None:
    """Keeps an evaluated candidate as a node."""
    self._git('update-ref', f'refs/nodes/{node}', commit)

  def merge(self, node: int) -> None:
    """Makes a node the incumbent."""
    self._git('update-ref', 'refs/heads/main', f'refs/nodes/{node}')

  def close(self, node: int) -> None:
    """Removes a worktree, if there is one."""
    if (self._rounds / str(node)).exists():
      self._git('worktree', 'remove', '--force', str(self._rounds / str(node)))

  def repair(
    self, nodes: Mapping[int, tuple[Scaffold, int | None]], incumbent: int
  ) -> None:
    """Adds missing nodes, parents first, and points `main` at the incumbent."""
    known = self._git('for-each-ref', '--format=%(refname:lstrip=2)', 'refs/nodes')
    for node in sorted(set(nodes) - set(map(int, known.split()))):
      scaffold, parent = nodes[node]
      scaffold.write(self.open(node, parent))
      self.keep(node, self.commit(node, title(node)))
      self.close(node)
    self.merge(incumbent)

  def _commit(self, tree: str, parent: str | None, node: int, message: str) -> str:
    date = f'{node + 1} +0000'
    env = {'GIT_AUTHOR_DATE': f'@{date}', 'GIT_COMMITTER_DATE': f'@{date}'}
    parents = ['-p', parent] if parent else []
    return self._git('commit-tree', tree, *parents, '-m', message, env=env)

  def _git(
    self, *arguments: str, cwd: pathlib.Path | None = None, env: Mapping = _PERSON
  ) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
    settings = {'GIT_CONFIG_NOSYSTEM': '1', 'GIT_CONFIG_GLOBAL': os.devnull}
    done = subprocess.run(
      ['git', *(x for value in _FIXED for x in ('-c', value)), *arguments],
      cwd=cwd or self._repository,
      env={**clean, **settings, **_PERSON, **env},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_S,
    )
    if done.returncode:
      said = (done.stderr or done.stdout).strip()
      raise GitFailed(f'git {" ".join(arguments[:3])}: {said[:500]}')
    return done.stdout.strip()


def title(node: int) -> str:
  """The message of a node's commit."""
  return f'Round {node}' if node else 'The start'
