"""The doctor in a job: it shows what it finds, and no error of it reaches the job."""

from __future__ import annotations

import pytest

from m2jax.evolve import doctor
from m2jax.evolve.doctor import live
from m2jax.observe import findings
from tests.evolve import runs
from tests.waiting import wait_until


@pytest.fixture
def workdir(tmp_path):
  records = runs.rl('white', 0, 60)
  for row in records[40:]:
    row['grad_norm'] *= 40
  runs.write(tmp_path, records)
  return tmp_path


def test_findings_are_shown_while_the_job_runs_and_at_its_end(workdir, monkeypatch):
  asked, shown = [], []
  examine = doctor.examine
  monkeypatch.setattr(
    doctor, 'examine', lambda *a, **k: asked.append(k['cheap']) or examine(*a, **k)
  )
  monkeypatch.setattr(live, 'REST', 0.0)
  with live.watching(workdir, shown.append, every_s=0.01):
    wait_until(lambda: shown)
  kinds = {x.kind for x in shown[-1]}
  assert 'gradient_jump' in kinds
  assert {x.kind for x in findings.read(workdir)} == kinds
  assert asked[0] and not asked[-1] and asked.count(False) == 1


def test_an_error_ends_the_thread_only(workdir, monkeypatch):
  asked = []

  def fails(*args, **options):
    asked.append(options['cheap'])
    raise MemoryError

  monkeypatch.setattr(doctor, 'examine', fails)
  with live.watching(workdir, asked.append, every_s=0.01):
    wait_until(lambda: asked)
  assert asked == [True, False]


def test_a_job_that_stops_is_not_examined_again(workdir, monkeypatch):
  monkeypatch.setattr(doctor, 'examine', lambda *a, **k: pytest.fail('examined'))
  with pytest.raises(KeyboardInterrupt), live.watching(workdir, print):
    raise KeyboardInterrupt


def test_cheap_reads_the_end_of_the_records_and_no_pool(workdir, monkeypatch):
  monkeypatch.setattr(doctor.history, 'CHEAP_BYTES', 2000)
  (workdir / 'pool.db').write_bytes(b'not a database' * 100)
  kinds = lambda **k: {x.kind for x in doctor.examine(workdir, now_s=1.7e9, **k)}
  assert kinds() == {'gradient_jump', 'damaged_pool'}
  assert kinds(cheap=True) == set()
