"""A drawn app: what is asked, how it is checked, and a solution in plain JavaScript."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Target = Mapping[str, Any]
Step = Sequence[Any]
_APPS = Path(__file__).parent / 'apps'
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="style.css">
</head>
<body>
<main><h1>{title}</h1><div id="app"></div></main>
<script src="app.js"></script>
</body>
</html>
"""


@dataclasses.dataclass(frozen=True)
class Criterion:
  """Attributes:
  id: short name, unique in its app.
  text: what must be true.
  steps: see verifier/steps.py; their inputs are unknown to the agent.
  files: path in the app → text of data files that replace the given ones.
  """

  id: str
  text: str
  steps: Sequence[Step]
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class App:
  """Attributes:
  kind: name of its module.
  title: the page's title.
  about: one sentence.
  rules: requirements, a line each.
  criteria: criteria of the interaction layer.
  view: steps to a state with content, of which the visual proxies are measured.
  view_files: data files in that state.
  config: config of the solution; the flags of `mutants` are among its keys.
  mutants: flag of the solution → criterion that fails without it.
  data: path in the app → text of the data files that the agent sees.
  clock: whether the verifier sets the page's clock.
  """

  kind: str
  title: str
  about: str
  rules: Sequence[str]
  criteria: Sequence[Criterion]
  view: Sequence[Step]
  config: Mapping[str, Any]
  mutants: Mapping[str, str]
  data: Mapping[str, str] = dataclasses.field(default_factory=dict)
  view_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  clock: bool = False

  def solution(self, without: str = '') -> dict[str, bytes]:
    """Files of a solution; `without` a flag it is a mutant that breaks one rule."""
    config = {**self.config, 'title': self.title}
    if without:
      config[without] = not config[without]
    script = (
      f'const CONFIG = {json.dumps(config, ensure_ascii=False)};\n'
      f'{_asset("dom.js")}\n{_asset(self.kind + ".js")}'
    )
    return {
      'index.html': _PAGE.format(title=self.title).encode(),
      'app.js': script.encode(),
      'style.css': _asset('style.css').encode(),
    }

  def spec(self) -> dict[str, Any]:
    """spec.json of the verifier."""
    return {
      'title': self.title,
      'clock': self.clock,
      'view': list(self.view),
      'view_files': dict(self.view_files),
      'criteria': [dataclasses.asdict(c) for c in self.criteria],
    }

  def instruction(self) -> str:
    """The instruction to the agent."""
    lines = [
      f'Build a small web app in app/: {self.about}',
      '',
      f'The page is app/index.html, in plain HTML, CSS and JavaScript, with the title '
      f'"{self.title}". It is served as it is: there is no build, no network and no '
      'other origin. Further files may be beside it, 1 MB in all.',
      '',
      'Requirements:',
      '',
      *(f'- {rule}' for rule in self.rules),
      '',
      'Controls are found by their ARIA role and accessible name or by their label, '
      'exactly as quoted, texts by data-testid; a text is compared without surrounding '
      'spaces, and must be what a person sees at that place.',
      '',
      'The page must work without console errors, dialogs (alert, confirm, prompt), '
      'other windows or failing requests. '
      + (_CLOCK if self.clock else '')
      + 'At widths of 375 and 1280 pixels: nothing is wider than the window, no '
      'text is '
      'on top of another or smaller than 12 pixels, text has a contrast of at least '
      '4.5 to a plain background colour, and controls are at least 24 pixels in width '
      'and height.',
    ]
    return '\n'.join(lines) + '\n'


_CLOCK = 'Time is that of Date, setInterval and setTimeout. '


def _asset(name: str) -> str:
  return (_APPS / name).read_text(encoding='utf-8')


def role(name: str, called: str | None = None, **more: Any) -> Target:
  """A target by its role and accessible name."""
  return {'role': name, **({} if called is None else {'name': called}), **more}


def button(called: str, **more: Any) -> Target:
  return role('button', called, **more)


def label(text: str, **more: Any) -> Target:
  """A form control by its label."""
  return {'label': text, **more}


def testid(name: str, **more: Any) -> Target:
  return {'testid': name, **more}


def click(called: str, **more: Any) -> Step:
  """A click on a button."""
  return ['click', button(called, **more)]


def fill(text: str, value: str) -> Step:
  """Types into the field of a label."""
  return ['fill', label(text), value]


def text(name: str, wanted: str, **more: Any) -> Step:
  """The text with a test id."""
  return ['text', testid(name, **more), wanted]


def texts(name: str, wanted: Sequence[str], **more: Any) -> Step:
  """The visible texts with a test id, in order."""
  return ['texts', testid(name, **more), list(wanted)]
