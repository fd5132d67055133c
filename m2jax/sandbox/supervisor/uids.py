"""Uids for sandboxes, none of which another supervisor of this machine uses.

The end of a sandbox kills whatever runs under its uid, so two supervisors must not have
one uid at the same time. Uids are taken from blocks of 64, and a supervisor holds a
block by a Unix socket bound to its abstract name: the kernel lets one process bind it,
and frees it when that process ends, however it ends. Abstract names belong to a network
namespace, so sockets are made in the one that the supervisor started in.
"""

from __future__ import annotations

import os
import socket

import linux

_BLOCK = 64


class Uids:
  """Uids of [low, high); each is given out again as late as its blocks allow."""

  def __init__(self, low: int, high: int):
    self._low, self._high = low, high
    self._network = linux.own_network()
    self._held: list[socket.socket] = []
    self._free: list[int] = []

  def take(self) -> int:
    """A uid that nothing else uses.

    Raises:
      OSError: this and other supervisors use all of them.
    """
    if not self._free:
      self._hold_another()
    return self._free.pop(0)

  def give_back(self, uid: int) -> None:
    """Nothing runs under the uid any more."""
    self._free.append(uid)

  def _hold_another(self) -> None:
    blocks = range(self._low // _BLOCK, -(-self._high // _BLOCK))
    first = os.getpid() % len(blocks)
    linux.enter_network(self._network)
    for block in (*blocks[first:], *blocks[:first]):
      held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
      try:
        held.bind(f'\0m2jax-uids-{block}')
      except OSError:  # this supervisor or another one has it
        held.close()
        continue
      self._held.append(held)
      start = block * _BLOCK
      self._free += range(max(start, self._low), min(start + _BLOCK, self._high))
      return
    raise OSError(f'all uids from {self._low} to {self._high} are in use')
