"""The trajectory page of a run on its gateway (`m2jax.viewer`)."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Collection

from absl import logging

from m2jax.forge import shared
from m2jax.gateway.server import Gateway
from m2jax.viewer import api, serving
from m2jax.viewer.run import Run


class Page:
  """Adds the page to a gateway, and says where it is once that has started."""

  def __init__(
    self,
    workdir: pathlib.Path,
    pool_url: str = '',
    key: str = '',
    names: Collection[str] = (),
  ):
    """Opens the run.

    Args:
      workdir: the run's workdir, whose pool exists.
      pool_url: its pool; '' is the database in the workdir.
      key: that the page's API needs; '' is the one in WORKDIR/keys/view, which is made
        if it does not exist.
      names: names by which other machines reach the gateway, besides its `hosts`.
    """
    self._run = Run(workdir, pool_url)
    self._key = key or shared.make_key(workdir, shared.VIEW)
    self._names = tuple(names)

  def attach(self, gateway: Gateway) -> None:
    """Adds the routes; before the gateway starts."""
    gateway.show_to(self._key)
    more = (*gateway.hosts, *self._names)
    gateway.extend(
      lambda app: api.add_routes(app, self._run, self._key, gateway.host, more)
    )

  def link(self, gateway: Gateway) -> str:
    """The address to open, of a gateway that has started."""
    more = (*gateway.hosts, *self._names)
    return serving.link(gateway.base_url, self._key, more)

  def announce(self, gateway: Gateway) -> None:
    """Shows the link on a terminal; a log gets the address, for others may read it."""
    link = self.link(gateway)
    if sys.stdout.isatty():
      print(f'trajectories, live: {link}', flush=True)
    else:
      address = link.partition('#')[0]
      logging.info('trajectories, live: %s; the key is keys/view', address)

  def __enter__(self) -> Page:
    return self

  def __exit__(self, *exc) -> None:
    self._run.close()
