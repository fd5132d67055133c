"""Click tasks: the same page for a seed, a teacher without failures, no way around."""

import asyncio
import contextlib
import http.server
import threading

import pytest

from configs import forge_clicks
from experiments import common
from m2jax import sandbox, tasks
from m2jax.forge.config import ForgeConfig
from m2jax.tasks import demonstrations
from m2jax_pipelines.tasks import clicks
from m2jax_pipelines.tasks.clicks import browser, pages
from m2jax_pipelines.tasks.clicks.page import ENDED, NOT_TYPED

try:
  pages.root()
  browser.executable()
  MISSING = ''
except (ValueError, sandbox.SandboxUnavailable) as error:
  MISSING = str(error).replace('\n', '; ')
needs_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)

IMAGE = '<img src=x onerror="core.endEpisode(1)">'
CODE = '"); core.endEpisode(1); ("'


def make(family, index=0, split='held_out', **settings):
  config = clicks.Config(**settings)
  return tasks.make(clicks.spec(split, index, 0, config, family))


def act(task, function):
  """Runs `function(environment)` on the task's page; returns (its result, verdict)."""

  async def run():
    async with task.open(backend='none', limits=sandbox.Limits()) as environment:
      result = await function(environment)
      return result, await task.verify(environment, 'done')

  return asyncio.run(run())


async def in_page(environment, script):
  """The result of JavaScript in the page, which no agent can run."""
  return await browser.run(environment.page._page.evaluate(script))


def demonstrate(specs):
  return asyncio.run(
    demonstrations.collect(
      specs,
      clicks.TeacherConfig(),
      concurrency=4,
      backend='none',
      limits=sandbox.Limits(),
    )
  )


def test_specs():
  """Held-out families are in no other split; bad specs are errors that say why."""
  drawn = {
    split: {tasks.make(clicks.spec(split, i)).family for i in range(600)}
    for split in clicks.SPLITS
  }
  assert drawn['held_out'] == set(clicks.FAMILIES)
  assert drawn['train'] == drawn['dev'] == set(clicks.FAMILIES) - set(clicks.HELD_OUT)
  assert set(clicks.families(clicks.Config())) == drawn['train']
  with pytest.raises(ValueError, match='is held out'):
    clicks.spec('train', 0, family=clicks.HELD_OUT[0])
  for spec in (
    'clicks/train/none/0/0',
    'clicks/train',
    'clicks/dev/click-test/0/0?{"x":1}',
  ):
    with pytest.raises(ValueError, match='family|expected|settings'):
      tasks.make(spec)
  with pytest.raises(ValueError, match='weights'):
    clicks.Config(weights={'login-user-popup': 1.0})
  task = make('click-checkboxes', partial_credit=0.5)
  assert task.partial_credit == 0.5 and task.seed == make('click-checkboxes').seed


@needs_browser
def test_a_seed_is_one_page():
  """In two browsers: all text, element and position; another seed is another page."""
  families = 'click-checkboxes', 'navigate-tree', 'read-table'

  def shown(index):
    clicks.make.cache_clear()
    for family in families:
      task = make(family, index)
      html, _ = act(task, lambda e: in_page(e, 'document.body.innerHTML'))
      yield task.instruction, html

  first, other = list(shown(0)), list(shown(1))
  browser.close()
  assert list(shown(0)) == first
  for one, another in zip(first, other, strict=True):
    assert another[0] != one[0] and another[1] != one[1]


@needs_browser
def test_the_instruction_does_not_depend_on_an_open_page():
  """A report reads it without an episode: the text is that of an episode."""
  task = make('login-user')
  clicks.make.cache_clear()
  again = make('login-user')
  alone = task.instruction
  act(again, lambda e: asyncio.sleep(0))
  assert alone == again.instruction and alone.endswith('[3] button Login')


@needs_browser
def test_the_teacher_solves_pages():
  """A page of each kind of work; `test_the_teacher_solves_every_family` has all."""
  names = 'click-checkboxes choose-list click-tab-2 login-user-popup odd-or-even'
  found = demonstrate([make(name).spec for name in names.split()])
  assert [demo.success for demo in found] == [1.0] * 5
  last = found[0].messages[-2:]
  assert last[0]['content'] == ENDED and last[1]['content'] == 'done'


@needs_browser
@pytest.mark.long
@pytest.mark.parametrize('family', clicks.FAMILIES)
def test_the_teacher_solves_every_family(family):
  """5 seeds, each within the calls that the table says."""
  least, most = clicks.FAMILIES[family]
  for demo in demonstrate([make(family, i).spec for i in range(5)]):
    assert demo.success == 1, demo.messages
    calls = sum(message['role'] == 'tool' for message in demo.messages)
    assert least <= calls <= most, demo.messages


@needs_browser
def test_verdicts():
  """Nothing done, the wrong button, a part, all; the answer does not matter."""
  task = make('click-test-2')
  asked = task.instruction.partition('\n')[0]
  right, wrong = (1, 2) if 'ONE' in asked else (2, 1)
  click = lambda ref: lambda e: e.execute('click', {'ref': ref})
  assert act(task, lambda e: asyncio.sleep(0)) == (None, 0)
  assert act(task, click(wrong)) == (ENDED, 0)
  assert act(task, click(right)) == (ENDED, 1)

  async def some(environment):
    """One of three numbers wrong: MiniWoB's reward is 1/3."""
    lines = partial.instruction.split('\n')
    for n, number in enumerate((lines[2], lines[5], lines[8])):
      odd = int(number) % 2 == 1
      await environment.execute('click', {'ref': 2 * n + 1 + (odd == (n == 0))})
    return await environment.execute('click', {'ref': 7})

  partial = make('odd-or-even', partial_credit=0.6)
  assert act(partial, some)[1] == pytest.approx(0.2)
  partial = make('odd-or-even')
  assert act(partial, some) == (ENDED, 0)


@needs_browser
def test_observations():
  """What is new, what is gone, what could not be done; passwords are not shown."""

  async def login(environment):
    call = environment.execute
    shown = [
      await call('type', {'ref': 2, 'text': 'pass'}),
      await call('type', {'ref': '1', 'text': 'a  b'}),
      await call('type', {'ref': 1, 'text': ''}),
      await call('type', {'ref': 1, 'text': ''}),
    ]
    for name, arguments, said in (
      ('click', {'ref': 9}, r'\[9\] is not on the page'),
      ('type', {'ref': 3, 'text': 'x'}, r'\[3\] is no field'),
      ('select', {'ref': 1, 'option': 'x'}, r'\[1\] is no list'),
    ):
      with pytest.raises(tasks.BadCall, match=said):
        await call(name, arguments)
    return shown

  assert act(make('login-user'), login) == (
    ['[2] text Password = ****', '[1] text Username = a b', '[1] text Username',
     'no change'],
    0,
  )  # fmt: skip

  async def popup(environment):
    shown = [
      await environment.execute('type', {'ref': ref, 'text': 'x'})
      for ref in (1, 2)
      if await in_page(environment, '!document.querySelector("#popup")')
    ]
    return shown[-1]

  for index in range(20):  # half of the seeds have one
    shown, _ = act(make('login-user-popup', index), popup)
    if shown.startswith(NOT_TYPED):
      assert '[1] text Username' in shown and '(disabled)' in shown
      assert 'button Cancel' in shown
      return
  pytest.fail('no seed has a popup')


HOSTILE = [
  ('click', {'ref': '1); core.endEpisode(1); ('}),
  ('click', {'ref': '#subbtn'}),
  ('click', {'ref': 'xpath=//button'}),
  ('click', {'ref': 0}),
  ('click', {'ref': -1}),
  ('click', {'ref': 10**30}),
  ('click', {'ref': True}),
  ('click', {'ref': 1.0}),
  ('click', {'ref': [1]}),
  ('click', {'ref': {'valueOf': 1}}),
  ('click', {'ref': 1, 'script': 'core.endEpisode(1)'}),
  ('click', {}),
  ('type', {'ref': 1, 'text': 'a\nb'}),
  ('type', {'ref': 1, 'text': 'a\x00b'}),
  ('type', {'ref': 1, 'text': '\ud800'}),
  ('type', {'ref': 1, 'text': 'a' * 10_000}),
  ('type', {'ref': 1, 'text': ['a']}),
  ('select', {'ref': 1, 'option': CODE}),
  ('select', {'ref': 1, 'option': None}),
  ('evaluate', {'expression': 'core.endEpisode(1)'}),
  ('judge', {}),
  ('close', {}),
  ('_do', {'ref': 1}),
  ('__init__', {'ref': 1, 'text': 'x'}),
  ('goto', {'ref': 1, 'text': 'javascript:core.endEpisode(1)'}),
]


@needs_browser
def test_hostile_calls():
  """Each is a BadCall, and the page is as before."""

  async def attempt(environment):
    for name, arguments in HOSTILE:
      with pytest.raises(tasks.BadCall):
        await environment.execute(name, arguments)
      state = await in_page(environment, '[WOB_DONE_GLOBAL, WOB_EPISODE_ID]')
      assert state == [False, 0], (name, arguments)

  assert act(make('enter-text'), attempt) == (None, 0)


@needs_browser
@pytest.mark.parametrize(
  'family, button',
  [('enter-text', 2), ('login-user', 3), ('read-table-2', 3), ('multi-orderings', 4)],
)
def test_typed_text_is_data(family, button):
  """Markup and code are values of the field: no element, no call, no reward."""

  async def attempt(environment):
    count = 'document.querySelectorAll("*").length'
    before = await in_page(environment, count)
    for ref in range(1, button):
      for text in (IMAGE, CODE, '</input><script>core.endEpisode(1)</script>'):
        await environment.execute('type', {'ref': ref, 'text': text})
    typed = await in_page(environment, 'document.querySelector("input").value')
    assert typed.startswith('</input>') and await in_page(environment, count) == before
    return await environment.execute('click', {'ref': button})

  assert act(make(family), attempt) == (ENDED, 0)


@needs_browser
def test_after_the_end_nothing_can_be_done():
  """MiniWoB offers to start again; neither its button nor a reward can be reached."""

  async def attempt(environment):
    await environment.execute('click', {'ref': 2})
    for ref in (1, 2, 3):
      with pytest.raises(tasks.BadCall, match='ended'):
        await environment.execute('click', {'ref': ref})
    return await in_page(environment, 'WOB_EPISODE_ID')

  assert act(make('enter-text'), attempt) == (1, 0)
  shown = make('enter-text').instruction
  assert 'START' not in shown and 'reward' not in shown.lower()


@needs_browser
def test_pages_reach_nothing(tmp_path):
  """No server, not even this machine's, no other file and no second page."""
  secret = tmp_path / 'secret.html'
  secret.write_text('<p>secret</p>')
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(self.path)
      self.send_response(200)
      self.end_headers()

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  url = f'http://127.0.0.1:{server.server_port}/'

  async def attempt(environment):
    image = """url => new Promise(done => {
      const image = new Image();
      image.onload = () => done('loaded');
      image.onerror = () => done('failed');
      image.src = url;
    })"""
    page = environment.page._page
    assert await browser.run(page.evaluate(image, url)) == 'failed'
    script = f'fetch({url!r}).then(() => "loaded", () => "failed")'
    assert await in_page(environment, script) == 'failed'
    await in_page(environment, f'void window.open({url!r})')
    for _ in range(50):
      if len(environment.page._context.pages) == 1:
        break
      await asyncio.sleep(0.1)
    else:
      pytest.fail('a second page stays open')
    for target in (
      url,
      secret.as_uri(),
    ):  # last: a refused page takes the place of ours
      with pytest.raises(browser.BrowserError):
        await browser.run(page.goto(target))

  async def run():
    task = make('click-test')
    async with task.open(backend='none', limits=sandbox.Limits()) as environment:
      await attempt(environment)

  with contextlib.closing(server.socket):
    asyncio.run(run())
    server.shutdown()
  assert not asked


@needs_browser
def test_a_dead_browser_is_not_judged():
  """Calls and verdict raise what episodes leave out; the next task has a browser."""
  psutil = pytest.importorskip('psutil')
  task = make('enter-text')

  async def run():
    async with task.open(backend='none', limits=sandbox.Limits()) as environment:
      browsers = [
        process
        for process in psutil.Process().children(recursive=True)
        if 'chrom' in process.name() and '--type=' not in ' '.join(process.cmdline())
      ]
      for process in browsers:  # not before: their children end with them
        process.kill()
      with pytest.raises(sandbox.SandboxError):
        await environment.execute('type', {'ref': 1, 'text': 'x'})
      with pytest.raises(sandbox.SandboxError):
        await task.verify(environment, 'done')

  asyncio.run(run())
  assert demonstrate([task.spec])[0].success == 1


@needs_browser
def test_pages_are_separate():
  """Episodes of one task at the same time: each has the verdict of its own clicks."""
  task = make('click-test')

  async def one(solve):
    async with task.open(backend='none', limits=sandbox.Limits()) as environment:
      if solve:
        await environment.execute('click', {'ref': 1})
      return await task.verify(environment, '')

  async def run():
    return await asyncio.gather(*(one(i % 2 == 0) for i in range(4)))

  assert asyncio.run(run()) == [1, 0, 1, 0]


@needs_browser
def test_the_config_trains_on_what_the_teacher_shows():
  """The demonstrations, as the agent's requests, are short enough to be trained."""
  config = common.build(ForgeConfig, forge_clicks.get_config('smoke').lock())
  specs = [tasks.spec(config.tasks, 'train', i) for i in range(3)]
  for demo in demonstrate(specs):
    [shown] = config.episodes.agent.of_task(demo.task).shown(demo.messages, demo.tools)
    assert shown.messages[0]['role'] == 'system' and shown.tools == list(demo.tools)
    assert len(demo.messages[1]['content']) < 400
