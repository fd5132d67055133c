"""What code and pages cite is there: sections of the facts, laws, files, tests."""

import pathlib
import re
import runpy

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / 'docs'
CODE = [
  path
  for folder in (
    *('m2jax', 'm2jax_pipelines', 'experiments', 'configs'),
    *('benchmarks', 'launch', 'tests'),
  )
  for path in sorted((ROOT / folder).rglob('*.py'))
]
TESTS = {
  name
  for path in CODE
  if path.is_relative_to(ROOT / 'tests')
  for name in re.findall(r'def (test_\w+)', path.read_text())
}
PAGES = [
  *(ROOT / f'{name}.md' for name in ('README', 'CONTRIBUTING', 'AGENTS', 'CHANGELOG')),
  *sorted(DOCS.rglob('*.md')),
]
# Targets of make; those of a pattern are spelled out.
TARGETS = set(re.findall(r'(?m)^([a-z][a-z-]*):', (ROOT / 'Makefile').read_text()))
PARTS = ('benchmarks', 'launch', 'pipelines', 'plan', 'viewer')
TARGETS |= {f'test-{part}' for part in PARTS}
CITED = re.compile(
  r'([a-z0-9-]+)\.md((?:,? (?:and )?§[0-9]+(?:\.[0-9]+)*(?:–[0-9]+)?)+)'
)


def sections(page: pathlib.Path) -> set[str]:
  """Numbers of the headings, and of numbered points below them: '1.4', '1.4.2'."""
  found, heading = set(), ''
  for line in page.read_text().splitlines():
    if match := re.match(r'#+ ([0-9]+(?:\.[0-9]+)*)\.? ', line):
      heading = match[1]
      found.add(heading)
    elif heading and (match := re.match(r'([0-9]+)\. ', line)):
      found.add(f'{heading}.{match[1]}')
  return found


@pytest.mark.parametrize('page', sorted(p.name for p in (DOCS / 'facts').glob('*.md')))
def test_cited_facts_are_there(page):
  """A reader who follows a citation finds the section."""
  known = sections(DOCS / 'facts' / page)
  for path in CODE:
    text = re.sub(r'\s*\n\s*(# )?', ' ', path.read_text())
    for name, numbers in CITED.findall(text):
      if f'{name}.md' == page:
        for number in re.findall(r'§([0-9.]+[0-9]|[0-9]+)', numbers):
          assert number in known, f'{path.relative_to(ROOT)}: {page} §{number}'


def test_cited_pages_are_there():
  """No citation names a page that a reader of the repository does not have."""
  pages = {path.name for path in PAGES}
  for path in CODE:
    for name, _ in CITED.findall(path.read_text()):
      assert f'{name}.md' in pages, f'{path.relative_to(ROOT)} cites {name}.md'


def test_cited_sections_and_laws_of_the_design_are_there():
  """'DESIGN §6' and 'law 5' mean docs/design.md."""
  known = sections(DOCS / 'design.md')
  for path in CODE:
    for number in re.findall(r'(?i:design) §([0-9]+)', path.read_text()):
      assert number in known, f'{path.relative_to(ROOT)}: DESIGN §{number}'
    for number in re.findall(r'\blaws? ([0-9]+)\b', path.read_text()):
      assert f'4.{number}' in known, f'{path.relative_to(ROOT)}: law {number}'


def anchors(page: pathlib.Path) -> set[str]:
  """Those that GitHub and the site give to a page's headings."""
  text = re.sub(r'(?ms)^```.*?^```', '', page.read_text())
  found: set[str] = set()
  for heading in re.findall(r'(?m)^#+ (.+)$', text):
    heading = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', heading)
    name = re.sub(r'[^\w\- ]', '', heading.strip().lower()).replace(' ', '-')
    found.add(name)
  return found


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_links_and_named_tests_are_there(page):
  """Relative links of a page, and the tests it names, exist."""
  text = page.read_text()
  for target, anchor in re.findall(r'\]\(([^)#:]*)(?:#([^)]*))?\)', text):
    other = page.parent / target if target else page
    assert other.exists(), f'{page.name} links to {target}'
    if anchor:
      assert anchor in anchors(other), f'{page.name} links to {target}#{anchor}'
  for target in re.findall(r'`(tests/[\w/]+(?:\.py)?)`', text):
    assert (ROOT / target).exists(), f'{page.name} names {target}'
  for name in re.findall(r'`(?:[\w/]+\.py::)?(test_\w+)`', text):
    assert name in TESTS, f'{page.name} names {name}'


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_commands_are_there(page):
  """Modules, configs and make targets that a page tells a reader to run exist."""
  text = page.read_text().replace('\\\n', ' ')
  code = re.findall(r'(?ms)^ *```.*?^ *```|`[^`]+`|^    .*?$', text)
  for name in re.findall(
    r'python -m ((?:m2jax|experiments|benchmarks|launch|tests)[\w.]*)', text
  ):
    path = ROOT / name.rstrip('.').replace('.', '/')
    found = path.with_suffix('.py').exists() or (path / '__main__.py').exists()
    assert found, f'{page.name} runs {name}'
  for name in re.findall(r'--config=(configs/\w+\.py)', text):
    assert (ROOT / name).exists(), f'{page.name} uses {name}'
  for name in re.findall(r'(?m)^[` ]*make ([a-z][a-z-]*)', '\n'.join(code)):
    assert name in TARGETS, f'{page.name} runs make {name}'


def test_every_page_is_in_the_site():
  """A page that no one lists is a page that no one reads."""
  listed = re.findall(r'([\w/-]+\.md)', (ROOT / 'mkdocs.yml').read_text())
  pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob('*.md')]
  assert sorted(listed) == sorted(pages)


def python_of(page: pathlib.Path, folder: pathlib.Path) -> dict:
  """The names that a page's block of Python that begins with `import jax` defines."""
  (code,) = re.findall(r'```python\n(import jax.*?)```', page.read_text(), re.DOTALL)
  (folder / 'code.py').write_text(code)
  return runpy.run_path(str(folder / 'code.py'))


@pytest.mark.smoke
def test_the_readme_s_code_runs(tmp_path):
  """The first thing a reader pastes works, and does what its comments say."""
  names = python_of(ROOT / 'README.md', tmp_path)
  assert names['logits'].shape == (1, 4, 768)
  batch = names['batch']
  assert batch.num_tokens == 5 and int((batch.weight > 0).sum()) == 4
  logprobs = jax.nn.log_softmax(names['logits'])[0, [0, 1, 2], [2, 3, 4]]
  np.testing.assert_allclose(names['logprobs'][0, 1:4], logprobs, rtol=1e-5)


@pytest.mark.smoke
def test_the_quickstart_s_code_runs(tmp_path):
  """Its gradient of the merged batch is that of the separate samples."""
  names = python_of(DOCS / 'quickstart.md', tmp_path)
  assert names['logits'].shape == (1, 4, 768)
  batch, params = names['batch'], names['variables']['params']
  assert batch.num_tokens == 5 and int((batch.weight > 0).sum()) == 4

  def alone(params):
    total = 0.0
    for sample in names['samples']:
      one = names['forest'].merge([sample], row_tokens=8)
      names['loss'].__globals__['batch'] = one
      total += names['loss'](params)
    return total

  gradient = jax.jit(jax.grad(alone))(params)
  for a, b in zip(
    jax.tree.leaves(names['gradient']), jax.tree.leaves(gradient), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
