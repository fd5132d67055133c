"""The kind `verifiers`: process and rows with a stand-in, episodes with the real."""

import asyncio
import os

import pytest

from m2jax import sandbox, tasks
from m2jax_pipelines.tasks import verifiers
from m2jax_pipelines.tasks.verifiers import process
from tests.experiments import conftest as jobs
from tests.pipelines.tasks import installed
from tests.pipelines.tasks.test_openenv import call, check_run, said

# A stand-in for server.py: the environment is told by its settings what to do.
STAND_IN = """
import json, os, sys
env = json.loads(sys.argv[1])
do = env["settings"]
def answer(number, **fields):
  print(json.dumps({"id": number, **fields}), flush=True)
if "start" in do:
  answer(None, error=do["start"]); sys.exit(1)
print("prints", file=sys.stderr)
answer(None, ok=None)
for line in sys.stdin:
  request = json.loads(line)
  op = request["op"]
  if op == do.get("die"):
    print("it is dead", file=sys.stderr); sys.exit(3)
  if op == do.get("rubbish"):
    print("{rubbish", flush=True)
  elif op == do.get("silent"):
    pass
  elif op == do.get("fail"):
    answer(request["id"], error="ValueError: no")
  elif op == "size":
    answer(request["id"], ok=do.get("size", 20))
  elif op == "open":
    row = {"role": "user", "content": str(request["row"])}
    answer(request["id"], ok={"messages": [row], "tools": [], "pid": os.getpid()})
  elif op == "turn":
    message = request["message"]["content"]
    more = [{"role": "user", "content": f"{message}?"}] if message != "end" else None
    answer(request["id"], ok=more)
  elif op == "reward":
    answer(request["id"], ok=do.get("reward", 1.0))
  else:
    answer(request["id"], ok=None)
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch, request):
  if 'python' in request.fixturenames:  # the real one
    yield
    return
  path = tmp_path / 'stand_in.py'
  path.write_text(STAND_IN)
  monkeypatch.setattr(process, 'SERVER', path)
  yield
  process.stop()


def play(turns=('hm', 'end'), index=0, split='train', tries=1, **fields):
  """(instruction, what followed, verdict) of the last of some episodes."""
  config = verifiers.Config(**{'env': 'toy-v1', 'timeout_s': 20, **fields})
  task = tasks.make(verifiers.spec(split, index, 0, config))

  async def once():
    async with task.open() as environment:
      followed = [await environment.respond(said(text)) for text in turns]
      return environment.instruction, followed, await task.verify(environment, '')

  async def run():
    for _ in range(tries - 1):
      with pytest.raises(sandbox.SandboxError):
        await once()
    return await once()

  return asyncio.run(run())


def test_turns_and_reward_cross_the_pipe():
  _, followed, verdict = play(settings={'reward': 3.0}, reward_range=(1.0, 5.0))
  assert followed == [[{'role': 'user', 'content': 'hm?'}], None] and verdict == 0.5


@pytest.mark.parametrize(
  'do, error',
  [
    ({'fail': 'open'}, "'toy-v1': ValueError: no"),
    ({'fail': 'turn'}, 'ValueError: no'),
    ({'fail': 'reward'}, 'ValueError: no'),
    ({'die': 'turn'}, 'its process ended: it is dead'),
    ({'rubbish': 'turn'}, 'its process ended'),
    ({'silent': 'turn'}, "no answer to 'turn' within 0.5 s"),
    ({'start': 'two seats'}, 'two seats'),
    ({'reward': 1.5}, r'task verifiers/train/0/0@toy-v1.*rewards 1\.5.*reward_range'),
    ({'reward': 'x'}, 'no number'),
    ({'reward': None}, 'no number'),
    ({'size': None}, 'has no end: set tasks.rows'),
    ({'size': 0}, 'none is left for train'),
  ],
)
def test_a_failure_of_the_environment_is_not_judged(do, error):
  limit = 0.5 if 'silent' in do else 20
  with pytest.raises(sandbox.SandboxError, match=error):
    play(settings=do, timeout_s=limit)


def test_an_interpreter_that_lacks_verifiers_says_what_to_install(monkeypatch):
  with pytest.raises(sandbox.SandboxError, match=r'No such file.*tasks\.python='):
    play(python='/no/python')
  process.SERVER.write_text('import no_such_module')
  with pytest.raises(sandbox.SandboxError, match=r'No module named.*pip install'):
    play()


def test_a_process_that_ended_is_replaced():
  """An episode that ends its process fails; the next one has a new process."""
  file = process.SERVER.with_name('once')
  program = STAND_IN.replace(
    'if op == do.get("die"):',
    f'if op == "turn" and not os.path.exists({str(file)!r}):\n'
    f'    open({str(file)!r}, "w").close()',
  )
  process.SERVER.write_text(program)
  assert play(tries=2)[2] == 1.0


def rows(split, count, **fields):
  return [int(play(index=i, split=split, **fields)[0]) for i in range(count)]


def test_splits_share_no_row_and_an_epoch_has_each_once():
  train = rows('train', 32)
  assert sorted(train[:16]) == sorted(train[16:]) and train[:16] != train[16:]
  dev, held_out = rows('dev', 2), rows('held_out', 2)
  assert sorted([*train[:16], *dev, *held_out]) == list(range(20))
  assert max(rows('train', 8, rows=10)) < 10
  assert sorted(rows('held_out', 20, shared=True)) == list(range(20))
  assert max(rows('train', 8, settings={'size': None}, rows=10)) < 10
  sizes = {'settings': {'size': 5}, 'evaluation': {'size': 4}}
  assert sorted(rows('train', 5, **sizes)) == [0, 1, 2, 3, 4]
  assert sorted(rows('dev', 2, **sizes)) == [0, 2]
  assert sorted(rows('held_out', 2, **sizes)) == [1, 3]


def test_specs():
  config = verifiers.Config(env='me/toy-v1', settings={'a': '?@/'}, max_turns=3)
  task = tasks.make(verifiers.spec('dev', 7, 3, config))
  assert (task.config, task.split, task.index, task.seed) == (config, 'dev', 7, 3)
  assert task.family == 'me/toy-v1' and task.max_tool_calls == 3
  with pytest.raises(ValueError, match='env'):
    verifiers.Config(env='../x')
  with pytest.raises(ValueError, match='set tasks.env'):
    verifiers.spec('train', 0, 0, verifiers.Config())


def test_the_teacher_needs_a_script():
  for script, error in (
    ('[]', 'is empty'),
    ('{', 'is no script'),
    ('[1]', 'no script'),
  ):
    with pytest.raises(ValueError, match=error):
      verifiers.TeacherConfig(script=script).turns()


@pytest.fixture(scope='module')
def python(request):
  """An interpreter with verifiers, that finds the environments of its sources."""
  found = installed.python(request.config, 'verifiers')
  before = os.environ.get('PYTHONPATH')
  fixtures = str(installed.fixtures(request.config, found))
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [fixtures, before]))
  yield found
  process.stop()
  if before is None:
    del os.environ['PYTHONPATH']
  else:
    os.environ['PYTHONPATH'] = before


def real(python, env, turns, **fields):
  """(environment, what followed each turn, verdict) of a real episode."""
  config = verifiers.Config(env=env, python=python, shared=True, **fields)
  task = tasks.make(verifiers.spec('train', 0, 0, config))

  async def run():
    async with task.open() as environment:
      followed = [await environment.respond(turn) for turn in turns]
      return environment, followed, await task.verify(environment, '')

  return asyncio.run(run())


@pytest.mark.thorough
def test_tools_of_a_published_environment(python):
  """verifiers' own `counter-tool-v1`: a tool server counts calls, a reward reads the
  count; also if the turns end first."""
  bump = [call('counter_bump', {}, n) for n in range(3)]
  turns = [bump[0], call('counter_rm', {}, 7), bump[1], said('done')]
  environment, followed, verdict = real(python, 'counter-tool-v1', turns)
  assert [t['function']['name'] for t in environment.tools] == ['counter_bump']
  assert 'Call the `bump` tool' in environment.instruction
  assert followed[0] == [{'role': 'tool', 'tool_call_id': 'c0', 'content': 'count=1'}]
  assert "no tool 'counter_rm'" in followed[1][0]['content']
  assert followed[2][0]['content'] == 'count=2'
  assert followed[3] is None and verdict == 1.0
  assert real(python, 'counter-tool-v1', [said('done')])[1:] == ([None], 0.0)
  _, followed, verdict = real(python, 'counter-tool-v1', bump[:2], max_turns=2)
  assert followed[-1] is None and verdict == 1.0


@pytest.mark.thorough
def test_users_and_refusals_of_published_environments(python):
  """A scripted user goes on after an answer; what is not played is refused by name."""
  environment, followed, verdict = real(
    python, 'echo-user-sim-v1', [said('hello world'), said('no')]
  )
  assert environment.instruction.endswith('extra words.\n\nhello world')
  assert followed == [[{'role': 'user', 'content': 'goodbye world'}], None]
  assert verdict == 0.5
  for env, error in (
    ('duet-v1', r"the seats \['a', 'b'\]"),
    ('no-such-env', "'no-such-env' not found"),
    ('agent-user-v1', 'harness of its own|container'),
  ):
    with pytest.raises(sandbox.SandboxError, match=error):
      real(python, env, [])


@pytest.mark.thorough
def test_forge_trains_on_one(python, tmp_path):
  """configs/environments.py:verifiers_smoke: demonstrations are verified by the
  environment's rewards, RL's episodes call its tools, and their rewards train."""
  jobs.run_module(
    'experiments.forge',
    '--config=configs/environments.py:verifiers_smoke',
    f'--config.tasks.python={python}',
    f'--workdir={tmp_path}',
  )
  check_run(tmp_path, 'counter_bump')
