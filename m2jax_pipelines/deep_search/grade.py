"""Judges answer.json of a deep-search task: the answer, and the passages it rests on.

    reward 1: the answer is one of the accepted ones, every needed passage is named, and
              at most `slack` others are

Naming everything is therefore no evidence. Only the standard library is used.
"""

import json
import os
import re

MAX_BYTES = 16384
MAX_ANSWER_CHARS = 300


def normal(text):
  """Without case, repeated white space, and one pair of quotes or a final period."""
  text = ' '.join(text.split()).casefold().removesuffix('.')
  return text[1:-1] if re.fullmatch(r'(["\'`]).*\1', text) and len(text) > 2 else text


def _once(pairs):
  """An object without duplicate keys: two answers count as none."""
  found = dict(pairs)
  if len(found) != len(pairs):
    raise ValueError('a key is repeated')
  return found


def judge(data, expected):
  """Returns (reward, reason, facts) for the bytes of answer.json, None if absent."""
  facts = {'evidence_found': 0, 'evidence_needed': len(expected['evidence'])}
  if data is None:
    return 0, 'no answer.json', facts
  if len(data) > MAX_BYTES:
    return 0, f'answer.json has more than {MAX_BYTES} bytes', facts
  try:
    given = json.loads(data.decode('utf-8'), object_pairs_hook=_once)
  except (ValueError, RecursionError) as error:
    return 0, f'answer.json is not JSON: {type(error).__name__}', facts
  if isinstance(given, dict) and set(given) != {'answer', 'evidence'}:
    return 0, 'answer.json has other keys than answer and evidence', facts
  answer = given.get('answer') if isinstance(given, dict) else None
  evidence = given.get('evidence') if isinstance(given, dict) else None
  if not isinstance(answer, str) or len(answer) > MAX_ANSWER_CHARS:
    return 0, f'answer is not a string of up to {MAX_ANSWER_CHARS} characters', facts
  if not isinstance(evidence, list) or not all(isinstance(e, str) for e in evidence):
    return 0, 'evidence is not a list of passage ids', facts
  needed, named = set(expected['evidence']), set(evidence)
  facts['evidence_found'] = len(needed & named)
  if normal(answer) not in {normal(a) for a in expected['answers']}:
    return 0, 'the answer is wrong', facts
  if len(named) > len(needed) + expected['slack']:
    return 0, f'{len(named)} passages are named, {len(needed)} are needed', facts
  if needed - named:
    return 0, f'{len(needed - named)} needed passages are not named', facts
  return 1, '', facts


def main():
  tests = os.environ.get('M2JAX_TESTS', os.path.dirname(os.path.abspath(__file__)))
  with open(os.path.join(tests, 'expected.json'), encoding='utf-8') as file:
    expected = json.load(file)
  # From here on, running out of memory or time is the doing of the answer.
  print('m2jax: ready', flush=True)
  path = os.path.join(os.environ.get('M2JAX_TREE', '/workspace'), 'answer.json')
  data = None
  if os.path.isfile(path) and not os.path.islink(path):
    with open(path, 'rb') as file:
      data = file.read(MAX_BYTES + 1)
  reward, reason, facts = judge(data, expected)
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  with open(os.path.join(logs, 'details.json'), 'w', encoding='utf-8') as file:
    json.dump({'reward': reward, 'reason': reason, **facts}, file)
  with open(os.path.join(logs, 'reward.txt'), 'w', encoding='utf-8') as file:
    file.write(str(reward))


if __name__ == '__main__':
  main()
