"""What the stages of the pre-training job read, from its settings to token arrays."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from configs import pretrain as pretrain_config
from experiments import common
from experiments import pretrain as job
from m2jax.data import quality

SOURCES = sorted((pathlib.Path(__file__).parents[2] / 'm2jax').glob('*/*.py'))[:30]


@pytest.fixture
def root(tmp_path):
  """A domain of code and one of records."""
  for path in SOURCES:
    copy = tmp_path / 'code' / path.parent.name / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(path.read_text()[:3000])
  (tmp_path / 'web').mkdir()
  lines = [{'text': f'A story of the number {i}. ' * 9} for i in range(60)]
  (tmp_path / 'web' / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  return tmp_path


def build(root, **text):
  c = pretrain_config.get_config('stages')
  c.text.domains = dict(
    code=dict(root=f'{root}/code', suffixes=('.py',), join='code'),
    web=dict(root=f'{root}/web', suffixes=('.jsonl',), weight=3.0),
  )
  c.text.held_out = 0.1
  c.text.update(text)
  return common.build(job.Config, c)


def encode(text):
  return list(text.encode())


def sources(config, root):
  train, _ = job.open_text(config.text)
  found = job.stage_sources(
    config.text, config.pretrain.stages, train, encode, seed=0, workdir=root
  )
  return train, found


def test_stages_read_what_their_context_asks_for(root):
  """Short stages read single documents, long ones joined ones up to their context;
  domains have the shares of their weights in all of them."""
  config = build(root, mixture=dict(cap=50.0, floor=0.0, gain=1.0, epoch=8.0))
  train, (short, middle, long) = sources(config, root)
  longest = max(len(encode(d.text)) for d in train.source)
  assert {len(short[i]) for i in range(len(short))} <= {
    len(encode(d.text)) for d in train.source
  }
  for source, context in ((middle, 1024), (long, 2048)):
    sizes = [len(source[i]) for i in range(len(source))]
    assert max(sizes) <= max(context + 100, longest)  # separators are not counted
  assert np.mean([len(long[i]) for i in range(len(long))]) > np.mean(
    [len(short[i]) for i in range(len(short))]
  )
  for source in (short, middle, long):
    arrays = [source[i] for i in range(len(source))]
    web = sum(len(a) for a in arrays if bytes(a[:7].tolist()) == b'A story')
    assert web / sum(map(len, arrays)) == pytest.approx(0.75, abs=0.05)
  assert len({short.fingerprint, middle.fingerprint, long.fingerprint}) == 3


def test_equal_stages_share_a_source(root):
  """So that the second goes on where the first stopped."""
  config = build(root, join_from_context=0)
  _, found = sources(config, root)
  assert found[0] is found[1] is found[2]


def test_quality_reaches_the_mixture(root):
  """Documents that the classifier likes come more often."""
  found = [path.read_text()[:3000] for path in SOURCES]
  bad = [text[::-1] for text in found]
  labels = [True] * len(found) + [False] * len(bad)
  quality.fit(found + bad, labels).save(root / 'quality.npz')
  for path in list((root / 'code').glob('*/*.py'))[::2]:
    path.write_text(path.read_text()[::-1])
  mixture = dict(cap=9.0, floor=0.0, gain=9.0, epoch=4.0)
  config = build(root, quality=f'{root}/quality.npz', mixture=mixture)
  config = dataclasses.replace(
    config,
    text=dataclasses.replace(
      config.text, domains={'code': config.text.domains['code']}
    ),
  )
  train, (short, *_) = sources(config, root)
  arrays = [bytes(short[i].tolist()).decode() for i in range(len(short))]
  times = {True: [], False: []}
  for document in train.source:
    times[document.text in found].append(arrays.count(document.text))
  assert np.mean(times[True]) > 2 * np.mean(times[False])


def test_bytes_per_token():
  """Of what is encoded, special tokens included."""
  texts = [job.Document('é' * 10, '')] * 3
  assert job.bytes_per_token(texts, lambda t: [0] * 5) == 4.0
