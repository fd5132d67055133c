"""Solves a deep-search task by its tools alone: it knows the question, not the answer.

plan.json is the question as data: {"starts": [clue, …], "words": [word, …]}. With one
start it follows links by words; with two it takes the passage that both link to.
"""

import json
import os
import re
import subprocess
import sys

WORKSPACE = os.environ.get('M2JAX_WORKSPACE', '.')
PASSAGES_READ = 5  # of a search


def tool(*words):
  command = [sys.executable, 'library.py', *words]
  done = subprocess.run(command, cwd=WORKSPACE, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f'{words[0]}: {done.stderr.strip()}')
  return done.stdout.splitlines()


def locate(clue):
  """The passage that shares most words with a clue, of the first search results."""
  wanted = set(re.findall(r'[a-z]{4,}', clue.lower()))
  best, most = None, -1.0
  for line in tool('search', clue)[:PASSAGES_READ]:
    one = line.split('\t')[0]
    text = ' '.join(tool('open', one)).lower()
    shared = len(wanted & set(re.findall(r'[a-z]{4,}', text)))
    if shared > most:
      best, most = one, shared
  return best


def links(one):
  rows = (line.split('\t') for line in tool('open', one))
  return [row[1] for row in rows if row[0] == 'link' and len(row) == 3]


def title(one):
  return tool('open', one)[0].split('\t')[1]


def solve(plan):
  path = [locate(clue) for clue in plan['starts']]
  if len(path) == 2:
    both = [one for one in links(path[0]) if one in links(path[1])]
    path.append(both[0])
  for word in plan['words']:
    found = {line.split('\t')[0] for line in tool('find', word, *links(path[-1]))}
    if len(found) != 1:
      raise SystemExit(f'{len(found)} linked passages mention {word!r}')
    path += found
  tool('submit', title(path[-1]), *path)


if __name__ == '__main__':
  here = os.path.dirname(os.path.abspath(__file__))
  with open(os.path.join(here, 'plan.json'), encoding='utf-8') as file:
    solve(json.load(file))
