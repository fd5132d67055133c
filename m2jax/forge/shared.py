"""What the roles find in the shared directory of a run.

WORKDIR/ config.json tokenizer.json  as in one process
         keys/                       `KEYS`, made by the learner
         weights/                    published versions (`checkpoint.published`)
         pool.db                     unless `RolesConfig.pool_url` names another one
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from absl import logging

from m2jax.checkpoint import policy, published
from m2jax.forge.config import ForgeConfig
from m2jax.forge.errors import RolloutsFailed
from m2jax.pool.data_pool import DataPool, PoolBroken
from m2jax.pool.database import shown_url
from m2jax.text import tokenizer
from m2jax.train.workdir import open_workdir

WEIGHTS = 'weights'
# What each key allows: to see the trajectory page and the gateway's counters; to open
# sessions; to begin and reward episodes over HTTP; to ask engines.
KEYS = VIEW, SESSION, REWARD, ENGINE = 'view', 'session', 'reward', 'engine'
KEYS_DIR, _POOL = 'keys', 'pool.id'
_POLL_S = 0.2
_SAY_EVERY_S = 30.0
WAIT_S = 24 * 3600.0  # for another role; demonstrations and SFT may take hours


def pool_url(config: ForgeConfig, workdir: Path) -> str:
  """URL of the pool's database."""
  return config.roles.pool_url or f'sqlite:///{workdir.absolute()}/pool.db'


def make_keys(config: ForgeConfig, workdir: Path) -> None:
  """Makes the files of `KEYS` once, unless a directory is configured."""
  if not config.roles.keys_dir:
    for name in KEYS:
      make_key(workdir, name)


def make_key(workdir: Path, name: str) -> str:
  """A key of a workdir; makes its file if it does not exist."""
  return make_secret(workdir / KEYS_DIR / name)


def make_secret(path: Path) -> str:
  """The secret at `path`; makes the file, for this user only, if it does not exist."""
  if not path.exists():
    path.parent.mkdir(0o700, exist_ok=True)
    new = path.with_suffix('.new')
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, 'w', encoding='ascii') as out:
      out.write(secrets.token_urlsafe(32))
    new.rename(path)
  return path.read_text(encoding='ascii').strip()


def read_key(config: ForgeConfig, workdir: Path, name: str) -> str:
  """One of `KEYS`. Raises ValueError if its file cannot be read or is empty."""
  path = _keys_dir(config, workdir) / name
  try:
    key = path.read_text(encoding='ascii').strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'config.roles.keys_dir: cannot read {path}: {error}') from error
  if not key or not key.isprintable() or ' ' in key:
    raise ValueError(
      f'config.roles.keys_dir: {path} must have one line of printable ASCII characters'
    )
  return key


def _keys_dir(config: ForgeConfig, workdir: Path) -> Path:
  return Path(config.roles.keys_dir or workdir / KEYS_DIR)


def join(config: ForgeConfig, workdir: Path) -> None:
  """Waits for the learner to have opened the workdir and made its keys.

  Raises:
    OtherRun: this role was started with other settings.
  """
  wait_for(f'the learner to open {workdir}', (workdir / 'config.json').exists)
  if not config.roles.keys_dir:
    last = workdir / KEYS_DIR / KEYS[-1]
    wait_for(f'the learner to write {last}', last.exists)
  open_workdir(config.anywhere(), workdir, leads=False)


def wait_for_tokenizer(workdir: Path) -> tokenizer.Tokenizer:
  """The run's tokenizer, once the learner has made it."""
  path = workdir / policy.TOKENIZER_FILE
  wait_for(f'the learner to make {path}', path.exists)
  return tokenizer.load(path)


def publisher(config: ForgeConfig, workdir: Path) -> published.Publisher:
  """The publisher of the run's weights; every process of the learner opens it."""
  return published.Publisher(
    workdir / WEIGHTS, dtype=config.model.dtype, full_every=config.roles.full_every
  )


def open_pool(config: ForgeConfig, workdir: Path) -> DataPool:
  """The run's pool; its process has to be able to write it.

  Raises:
    ValueError: `config.roles.pool_url` cannot be used; says why.
  """
  try:
    return DataPool(pool_url(config, workdir), outage_s=config.roles.pool_outage_s)
  except (ValueError, PoolBroken) as error:
    raise ValueError(f'config.roles.pool_url: {error}') from error


def claim_pool(config: ForgeConfig, workdir: Path) -> DataPool:
  """The run's pool, for the learner, whose run it must be.

  Each start draws a token, for WORKDIR/pool.id and for the pool. If a workdir lacks the
  pool's token, a copy of it, or the workdir that it was copied from, has run since.

  Raises:
    ValueError: `config.roles.pool_url` has the items of another run, or this workdir
      is not the one that used it last.
  """
  pool = open_pool(config, workdir)
  path = workdir / _POOL
  if not config.roles.pool_url:  # a copy of the workdir has a copy of the pool
    return pool
  url = f'config.roles.pool_url={shown_url(config.roles.pool_url)!r}'
  run, *tokens = (path.read_text() if path.exists() else '').split() or ['']
  owner, token = pool.owner(), secrets.token_hex(8)
  if run != pool.run and (run or pool.next_index()):
    pool.close()
    raise ValueError(
      f'{url}: has the pool of another run than {workdir}: give an empty database'
    )
  new = path.with_suffix('.new')
  if not owner or owner in tokens:
    new.write_text(f'{pool.run} {owner} {token}')  # either, if it ends here
    new.replace(path)
  if (owner and owner not in tokens) or not pool.change_owner(owner, token):
    pool.close()
    raise ValueError(
      f'{url}: a copy of {workdir}, or what this is a copy of, has used the pool '
      'since: start that one, or give this one an empty database. If only this one is '
      f"left, copy that one's {_POOL} here"
    )
  return pool


def wait_for(
  what: str, condition: Callable[[], bool], timeout_s: float = WAIT_S
) -> None:
  """Waits; logs now and then what for.

  Raises:
    RolloutsFailed: it has not come after `timeout_s`.
  """
  began_s = time.monotonic()
  say_s = began_s + 1.0
  while not condition():
    if time.monotonic() - began_s >= timeout_s:
      raise RolloutsFailed(f'waited {timeout_s:g} s for {what}')
    if time.monotonic() >= say_s:
      logging.info('waiting for %s', what)
      say_s = time.monotonic() + _SAY_EVERY_S
    time.sleep(_POLL_S)
