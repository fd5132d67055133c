"""Deep search: multi-hop questions over a real corpus, with tools and evidence.

The agent searches (BM25), opens and finds in a library; the answer counts only with the
passages that support it. facts/pipelines.md §5; docs/pipelines.md. A task's source is
its corpus, so a held-out corpus is never trained on.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from m2jax.checks import require
from m2jax.tasks import harbor
from m2jax_pipelines import installed
from m2jax_pipelines.candidate import Candidate, PipelineConfig, attempted
from m2jax_pipelines.context import Context
from m2jax_pipelines.deep_search import corpora, library, questions

_HERE = Path(__file__).parent
_PACKAGES = ('bm25s', 'numpy')
_SITE = 'deep_search'
_LEAST_SHARED = 0.25  # of a clue's words, in a rewritten question
_TEST = 'exec python3 -I -S -B "${M2JAX_TESTS:-/tests}/grade.py"\n'
_SOLVE = (
  'cd "${M2JAX_WORKSPACE:-/workspace}" && '
  'exec python3 "${M2JAX_SOLUTION:-/solution}/solve.py"\n'
)
_TOOLS = """\

Tools, in the workspace:

    python3 library.py search QUERY        ten passages: id, title, beginning
    python3 library.py open ID [LINE]      its links and its text
    python3 library.py find TEXT ID...     which of these passages mention a text
    python3 library.py submit ANSWER ID... the answer, and all passages it rests on

Submit the title and the id of every passage on the way, the last one included, and no
others: an answer without its evidence is worth nothing.
"""


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """Attributes:
  corpora: modules of `corpora`, used in turn.
  hops: passages that a chain's question needs, used in turn.
  meetings: share of questions of the family 'meeting'.
  draws: attempts for one candidate, before a corpus is given up.
  slack: passages that may be named beside the needed ones.
  """

  kind: str = 'deep_search'
  dev: tuple[str, ...] = ('debian',)
  held_out: tuple[str, ...] = ('python',)
  corpora: tuple[str, ...] = ('foldoc', 'python', 'debian')
  hops: tuple[int, ...] = (2, 3, 4)
  meetings: float = 0.25
  draws: int = 3000
  slack: int = 1

  def __post_init__(self):
    super().__post_init__()
    require(self, self.corpora, 'corpora', 'at least one')
    require(
      self, all(h > 1 for h in self.hops), 'hops', 'above 1: one search is no task'
    )
    require(self, 0 <= self.meetings <= 1, 'meetings', 'a share in [0, 1]')
    require(self, self.slack >= 0, 'slack', '0 or more')


async def candidates(config: Config, context: Context) -> AsyncIterator[Candidate]:
  """Yields questions over the corpora in turn, without end."""
  libraries = {}
  installed.site(context.directory('sites'), _SITE, _PACKAGES)
  for name in config.corpora:
    context.say(f'corpus {name}')
    libraries[name] = prepared(name, context)
  number = 0
  while libraries:
    for name in list(libraries):
      context.say(name)
      work = _candidate(config, context, *libraries[name], name, number)
      made = await attempted(work, f'{name}/{number}', 'question', '', name)
      if made is None:
        del libraries[name]
      else:
        yield made
    number += 1


def prepared(name: str, context: Context) -> tuple[questions.Graph, Path]:
  """The graph of a corpus, and the archive of its library."""
  corpus = corpora.load(name, context.directory('sources'))
  root = context.directory('libraries') / name
  archive = root.with_suffix('.tar.gz')
  if not archive.exists():
    shutil.rmtree(root, ignore_errors=True)
    library.save(rows(corpus), str(root / 'library'))
    shutil.copyfile(_HERE / 'library.py', root / 'library.py')
    partial = root.with_suffix('.partial')
    with tarfile.open(partial, 'w:gz', compresslevel=6) as tar:
      tar.add(root, '.')
    partial.rename(archive)
  ranker = library.Ranker(str(root / 'library'), list(corpus.passages))
  return questions.Graph(corpus, ranker), archive


def rows(corpus: corpora.Corpus) -> list[dict]:
  """The passages as the library's records."""
  return [
    {'id': p.id, 'title': p.title, 'text': p.text, 'links': list(p.links)}
    for p in corpus.passages.values()
  ]


async def _candidate(config, context, graph, archive, name, number):
  """The number-th question of a corpus; None if the corpus has no more."""
  own = f'{name}/{number}'
  if own in context.done:
    return Candidate(own, 'question', '', name)
  started = time.monotonic()
  rng = random.Random(f'{config.seed}/{own}')
  hops = config.hops[number % len(config.hops)]
  meeting = rng.random() < config.meetings
  for _ in range(config.draws):
    question = graph.meeting(rng) if meeting else graph.chain(hops, rng)
    if question is not None:
      break
  else:
    return None
  text = questions.text(question, graph.corpus.description)
  statement = await context.author.write(
    _messages(text), lambda: text, lambda new: _keeps(new, question)
  )
  lazy = question.path[-1] in graph.lazy(question, statement.text)
  return Candidate(
    own,
    'question',
    f'{question.family}-{question.hops}',
    name,
    draft=None if lazy else _draft(config, graph, archive, question, statement, own),
    text=statement.text,
    reason='one search finds the answer' if lazy else '',
    wall_s=time.monotonic() - started,
    facts={
      'hops': question.hops,
      'author': statement.by,
      'source': graph.corpus.source.name,
    },
  )


def _messages(text: str):
  request = (
    'Rewrite this question. Keep its order, and each quoted single word as it is. '
    'Describe the long quotations less directly. Name nothing that it does not name.'
  )
  return [{'role': 'user', 'content': f'{request}\n\n{text}'}]


def _keeps(text: str, question: questions.Question) -> bool:
  """Whether a rewritten question has all words, enough of each clue to search for it,
  and does not reveal the answer."""
  kept = all(f'"{word}"' in text for word in question.words)
  kept &= all(questions.shared(clue, text) >= _LEAST_SHARED for clue in question.starts)
  return kept and not any(a.casefold() in text.casefold() for a in question.answers)


def _draft(config, graph, archive, question, statement, own) -> harbor.Draft:
  expected = {
    'answers': list(question.answers),
    'evidence': list(question.path),
    'slack': config.slack,
  }
  plan = {'starts': list(question.starts), 'words': list(question.words)}
  calls = 2 * len(question.starts) + 2 * len(question.words) + 1
  metadata = harbor.Metadata(
    'deep_search',
    f'{question.family}-{question.hops}',
    collect=('answer.json',),
    site=_SITE,
    max_tool_calls=10 * calls,
    baseline_calls=calls,
    source=graph.corpus.source.facts(),
    details={'hops': question.hops, 'author': statement.by},
  )
  versions = [f'{n}=={installed.distribution(n).version}' for n in _PACKAGES]
  return harbor.Draft(
    name='deep_search-' + own.replace('/', '-'),
    instruction=statement.text + '\n' + _TOOLS,
    metadata=metadata,
    archive=archive,
    tests={
      'test.sh': _TEST.encode(),
      'grade.py': (_HERE / 'grade.py').read_bytes(),
      'expected.json': json.dumps(expected).encode(),
    },
    solution={
      'solve.sh': _SOLVE.encode(),
      'solve.py': (_HERE / 'solve.py').read_bytes(),
      'plan.json': json.dumps(plan).encode(),
    },
    install=tuple(versions),
    verifier_s=60.0,
  )
