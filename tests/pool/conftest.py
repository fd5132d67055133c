"""The same tests on both databases; without PostgreSQL they fail, they do not skip."""

from __future__ import annotations

import pytest

from tests.pool import postgres


@pytest.fixture(scope='session')
def postgresql():
  """A private PostgreSQL server."""
  server = postgres.Server()
  try:
    yield server.start()
  finally:
    server.close()


@pytest.fixture(scope='session', params=['sqlite', 'postgresql'])
def new_url(request, tmp_path_factory):
  """A function that returns the URL of a new, empty database, or of a schema."""
  if request.param == 'postgresql':
    return request.getfixturevalue('postgresql').new_url
  return lambda: f'sqlite:///{tmp_path_factory.mktemp("pool")}/pool.db'


@pytest.fixture
def url(new_url):
  """The URL of a new, empty database."""
  return new_url()
