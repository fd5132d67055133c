"""Clicks: small web pages that a real browser shows, operates and judges.

MiniWoB++ (`clicks.pages`) in Chromium: the agent reads a page as lines, and acts
with `click`, `type` and `select`; the page's own code gives the reward. A spec:

    clicks/train/login-user/7/12        split, family, seed, index
"""

from m2jax_pipelines.tasks.clicks.pages import FAMILIES, HELD_OUT
from m2jax_pipelines.tasks.clicks.task import (
  SPLITS,
  TOOLS,
  ClicksConfig,
  ClicksTask,
  families,
  make,
  spec,
)
from m2jax_pipelines.tasks.clicks.teacher import TeacherConfig, demonstrate, lesson

Config = ClicksConfig

__all__ = [
  'FAMILIES',
  'HELD_OUT',
  'SPLITS',
  'TOOLS',
  'ClicksConfig',
  'ClicksTask',
  'Config',
  'TeacherConfig',
  'demonstrate',
  'families',
  'lesson',
  'make',
  'spec',
]
