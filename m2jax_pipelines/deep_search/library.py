"""The tools of a deep-search task: search, open, find, submit.

Copied into each task, beside `library/passages.jsonl` and `library/index`; the ranking
is BM25 of `bm25s`.

    python3 library.py search QUERY            ten passages: id, title, beginning
    python3 library.py open ID [LINE]          links and text, from a line on
    python3 library.py find TEXT ID...         which of these passages mention a text
    python3 library.py submit ANSWER ID...     writes answer.json; the ids are evidence
"""

import json
import logging
import os
import sys

HITS, PAGE_CHARS, MAX_IDS = 10, 3000, 200
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'library')


def passages(root=ROOT):
  """The passages by id."""
  with open(os.path.join(root, 'passages.jsonl'), encoding='utf-8') as file:
    rows = map(json.loads, file)
    return {row['id']: row for row in rows}


def save(rows, root):
  """Writes passages (dicts of id, title, text, links) and their index."""
  import bm25s

  os.makedirs(root, exist_ok=True)
  with open(os.path.join(root, 'passages.jsonl'), 'w', encoding='utf-8') as file:
    for row in rows:
      file.write(json.dumps(row, ensure_ascii=False) + '\n')
  logging.getLogger('bm25s').setLevel(logging.WARNING)
  index = bm25s.BM25()
  texts = [f'{row["title"]}\n{row["text"]}' for row in rows]
  index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
  index.save(os.path.join(root, 'index'))


class Ranker:
  """Ranks the passages of a library."""

  def __init__(self, root=ROOT, ids=None):
    import bm25s

    self._bm25s = bm25s
    self._index = bm25s.BM25.load(os.path.join(root, 'index'))
    self._ids = list(passages(root)) if ids is None else list(ids)

  def search(self, query, hits=HITS):
    """Ids of the best passages, best first; without a common word, none."""
    words = self._bm25s.tokenize([query], show_progress=False, return_ids=False)
    if not words[0]:
      return []
    count = min(hits, len(self._ids))
    found, scores = self._index.retrieve(words, k=count, show_progress=False)
    ranked = zip(found[0], scores[0], strict=True)
    return [self._ids[i] for i, score in ranked if score > 0]


def search(query):
  known = passages()
  for one in Ranker(ids=known).search(query):
    row = known[one]
    print(f'{one}\t{row["title"]}\t{" ".join(row["text"].split())[:120]}')


def show(one, line=1):
  known = passages()
  row = known.get(one) or sys.exit(f'no passage {one}')
  lines = row['text'].splitlines()
  print(f'{one}\t{row["title"]}')
  if line == 1:
    for link in row['links']:
      print(f'link\t{link}\t{known[link]["title"]}')
  shown = 0
  for number, text in enumerate(lines[line - 1 :], line):
    shown += len(text) + 1
    if shown > PAGE_CHARS:
      print(f'[to go on: open {one} {number}]')
      break
    print(text)


def find(text, ids):
  known = passages()
  for one in ids[:MAX_IDS]:
    row = known.get(one) or sys.exit(f'no passage {one}')
    whole = f'{row["title"]}\n{row["text"]}'
    lines = [line for line in whole.splitlines() if text.lower() in line.lower()]
    for line in lines[:3]:
      print(f'{one}\t{row["title"]}\t{line.strip()[:160]}')


def submit(answer, evidence):
  with open('answer.json', 'w', encoding='utf-8') as file:
    json.dump({'answer': answer, 'evidence': evidence}, file)
  print('submitted')


def main(command='', *words):
  if command == 'search' and words:
    search(' '.join(words))
  elif command == 'open' and len(words) in (1, 2):
    show(words[0], max(1, int(words[1])) if len(words) == 2 else 1)
  elif command == 'find' and len(words) > 1:
    find(words[0], words[1:])
  elif command == 'submit' and words:
    submit(words[0], list(words[1:]))
  else:
    sys.exit(__doc__)


if __name__ == '__main__':
  main(*sys.argv[1:])
