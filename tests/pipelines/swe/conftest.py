"""One environment for all tests of SWE-scaling."""

from __future__ import annotations

import pytest

from tests.pipelines.swe import package


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
  return tmp_path_factory.mktemp('swe')


@pytest.fixture(scope='session')
def env(dataset):
  return package.build(dataset)
