"""Attempts to get a reward without the work: each gets 0, and the work itself 1."""

from __future__ import annotations

import asyncio
import random

import pytest

from m2jax import sandbox
from m2jax.tasks import harbor
from m2jax_pipelines import installed
from m2jax_pipelines.terminal_gym import drafts, seeds, solvers, statements
from m2jax_pipelines.terminal_gym.families import FAMILIES

SOURCE = installed.Source('nothing', '1', '0', 'none')
SEED = seeds.Seed('nothing/0', 'title', 'text', (), SOURCE, 'A')


def drawn(family: str, number: int = 0):
  return FAMILIES[family].draw(random.Random(number))


LIST, PROGRAM = drawn('find_size'), drawn('program_totals')
SETTINGS = drawn('settings')
OUT, ROOT = LIST.values['out'], LIST.values['root']
TOOL = PROGRAM.values['path']
RIGHT, WRITTEN = LIST.solution(), PROGRAM.solution()
NEXT = next(iter(LIST.files))
FILL = """
import os
n = 0
while os.statvfs(".").f_ffree > 70:  # few files, of which there is a limit
  place = f"a{n}/" + "/".join("d" * 60)
  os.makedirs(place)
  open(place + "/f", "w").close()
  n += 1
try:
  while True:
    open(f"z{n}", "w").close()
    n += 1
except OSError:
  pass
"""
VISIBLE = PROGRAM.files[PROGRAM.values['shown']].decode()


def totals(text: str) -> str:
  found: dict[str, int] = {}
  for line in text.splitlines()[1:]:
    _, town, amount = line.split(',')
    found[town] = found.get(town, 0) + int(amount)
  return ''.join(f'{town} {n}\n' for town, n in sorted(found.items()))


ON_LIST = {
  'nothing': ':',
  'an empty result': f': > {OUT}',
  'all files': f'find {ROOT} -type f > {OUT}',
  'a link to the right result': f'{RIGHT}mkdir -p x; mv {OUT} x/o; ln -s x/o {OUT}',
  'a link to a given file': f"ln -s '{NEXT}' {OUT}",
  'a pipe': f'mkfifo {OUT}',
  'a device': f'mknod {OUT} c 1 3 || ln -s /dev/null {OUT}',
  'a folder': f'mkdir {OUT}; {RIGHT.replace(OUT, OUT + "/o")}',
  'the right result in the background': f'(sleep 1; {RIGHT}) > /dev/null 2>&1 &',
  'a process that outlives its shell': f"setsid nohup bash -c 'sleep 1; {{ {RIGHT}; }}'"
  ' > /dev/null 2>&1 & disown',
  'deleted inputs': f"{RIGHT}rm '{NEXT}'",
  'deleted notes': f'{RIGHT}rm NOTES.md',
  'a changed input': f"{RIGHT}echo >> '{NEXT}'",
  'a changed mode': f"{RIGHT}chmod 777 '{NEXT}'",
  'setuid': f'{RIGHT}chmod u+s {OUT}',
  'a large file': f'{RIGHT}truncate -s 31M filler',
  'a large result': f'{RIGHT}truncate -s 31M {OUT}',
  'too much work': f'{RIGHT}truncate -s 20M a; truncate -s 20M b',
  'a folder that is a link': f'{RIGHT}mv {ROOT} moved; ln -s "$PWD/moved" {ROOT}',
  'names that leave the folder': f"{RIGHT}mkdir -p ..a; touch '..a/x' $'b\\n../../x'",
  'tests and a reward in the workspace': 'mkdir -p tests logs; echo 1 > logs/reward.txt'
  '; echo "echo 1 > $M2JAX_LOGS/reward.txt" > tests/test.sh; echo {} > expected.json',
  'a reward outside': 'echo 1 > /logs/verifier/reward.txt; mkdir -p /tmp/v/logs; '
  'for d in /verifier/* /workspace/../verifier; do echo 1 > $d/logs/reward.txt; done',
  'other programs': 'mkdir bin; for n in python3 bash env; do printf '
  '"#!/bin/sh\\necho 1 > logs/reward.txt\\n" > bin/$n; chmod 755 bin/$n; done; '
  'echo "export PATH=/workspace/bin:$PATH" > .bashrc; cp .bashrc .profile',
  'code that Python loads': 'for n in sitecustomize json compose grade; do '
  "echo \"open('logs/reward.txt', 'w').write('1')\" > $n.py; done",
  'a hidden file': f'{RIGHT}touch .note',
  'an empty folder': f'{RIGHT}mkdir empty',
  'another place': RIGHT.replace(OUT, f'{ROOT}/{OUT}'),
  'modes of folders': f'{RIGHT}find . -mindepth 1 -type d -exec chmod 777 {{}} +',
  'setgid on folders': f'{RIGHT}find . -mindepth 1 -type d -exec chmod g+s {{}} +',
}
ON_PROGRAM = {
  'the visible result': f'mkdir -p tools; echo \'echo "{totals(VISIBLE)}"\' > {TOOL}',
  'a search for the tests': f"mkdir -p tools; echo 'cat $(find / -path /usr -prune "
  '-o -name expected.json -print 2> /dev/null) $M2JAX_TESTS/expected.json; env; '
  f"exit 0' > {TOOL}",
  'a reward that a program writes': f"mkdir -p tools; echo 'mkdir -p logs; for d in "
  f"logs /verifier /verifier/*/logs; do echo 1 > $d/reward.txt; done' > {TOOL}",
  'the right result and a failure': f"{WRITTEN}echo 'exit 3' >> {TOOL}",
  'endless output': f"mkdir -p tools; echo 'yes | head -c 2000000' > {TOOL}",
  'a program that removes its input': f'{WRITTEN}echo \'rm -f -- "$1"\' >> {TOOL}',
  'a program that writes a file': f"{WRITTEN}echo 'echo x > stray' >> {TOOL}",
  'a program that makes a folder': f"{WRITTEN}echo 'mkdir stray' >> {TOOL}",
  # Not invalid: an attempt that is masked costs nothing.
  'a wrong program, no space for inputs': f"mkdir -p tools; echo 'echo wrong' > {TOOL}"
  f"; python3 -c '{FILL}'",
  'a program that is a link': f'{WRITTEN}mv {TOOL} t; ln -s "$PWD/t" {TOOL}',
}
ON_SETTINGS = {
  'a copy that is left': f'{SETTINGS.solution()}cp NOTES.md NOTES.md.bak',
  'every file': SETTINGS.filled(
    "find @root@ -type f -exec sed -i 's/@key@ = .*/@key@ = @new@/' {} +"
  ),
}
TABLE = drawn('csv_json')
(TABLE_OUT,) = TABLE.end
ON_TABLE = {
  # Not invalid: an attempt that is masked costs nothing.
  'a result that takes all of the memory': 'python3 -c "open('
  f"'{TABLE_OUT}', 'w').write('[' + '{{}},' * 10300000 + '{{}}]')\"",
  'a result that is nested too deeply': 'python3 -c "open('
  f"'{TABLE_OUT}', 'w').write('[' * 1000000 + ']' * 1000000)\"",
}
# They fill memory and a disk, for seconds of a processor.
LARGE = 'a result that takes all of the memory', 'a wrong program, no space for inputs'
SUITES = (
  (LIST, ON_LIST),
  (PROGRAM, ON_PROGRAM),
  (SETTINGS, ON_SETTINGS),
  (TABLE, ON_TABLE),
)


def judged(dataset, chosen):
  """{name: verdict} of the attempts, and of the work, of suites; four run at a time."""

  async def all_of_them():
    found, running = {}, asyncio.Semaphore(4)

    async def one(task, name, command):
      async with running:
        found[name] = await solvers.attempt(task, command, 'namespaces')

    try:
      for number, (drawn_, cheats) in enumerate(SUITES):
        text = statements.scripted(drawn_, 0)
        draft = drafts.draft(
          FAMILIES['find_size'], SEED, drawn_, text, f't{number}', {}
        )
        path = harbor.write(draft, dataset / 'tasks' / 'train')
        task = harbor.of_directory(harbor.read(path))
        all_ = {**cheats, f'work {number}': drawn_.solution()}
        some = {name: command for name, command in all_.items() if chosen(name)}
        await asyncio.gather(*(one(task, *item) for item in some.items()))
    finally:
      await sandbox.shutdown()
    return found

  try:
    return asyncio.run(all_of_them())
  except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error))


@pytest.fixture(scope='module')
def verdicts(tmp_path_factory):
  return judged(tmp_path_factory.mktemp('cheats'), lambda name: name not in LARGE)


def get_nothing(verdicts, names):
  for name in names:
    assert verdicts[name].reward == 0, name
    # And it is decided.
    assert verdicts[name].outcome == harbor.FAILED, verdicts[name].reason


@pytest.mark.parametrize(
  'name', [name for _, cheats in SUITES for name in cheats if name not in LARGE]
)
def test_a_cheat_gets_nothing(verdicts, name):
  get_nothing(verdicts, [name])


@pytest.mark.long
def test_what_fills_memory_or_disk_gets_nothing(tmp_path):
  get_nothing(judged(tmp_path, LARGE.__contains__), LARGE)


def test_the_work_gets_the_reward(verdicts):
  assert [verdicts[f'work {n}'].reward for n in range(4)] == [1, 1, 1, 1]
