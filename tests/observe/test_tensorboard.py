"""Event files as TensorBoard would read them: framing, values, restarts."""

from __future__ import annotations

import pathlib
import re
import struct

import pytest
from tensorboardX.proto import event_pb2

from m2jax.observe import metrics, names


def _crc32c(data: bytes) -> int:
  """Castagnoli's CRC, bit by bit (reflected polynomial 0x82F63B78)."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
  crc = _crc32c(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _events(path: pathlib.Path) -> list[event_pb2.Event]:
  """Parses TFRecord framing: length, its CRC, data, its CRC."""
  data, at, events = path.read_bytes(), 0, []
  while at < len(data):
    length, length_crc = struct.unpack_from('<QI', data, at)
    assert length_crc == _masked(data[at : at + 8])
    body = data[at + 12 : at + 12 + length]
    (body_crc,) = struct.unpack_from('<I', data, at + 12 + length)
    assert body_crc == _masked(body)
    events.append(event_pb2.Event.FromString(body))
    at += 16 + length
  return events


def _shown(directory: pathlib.Path, tag: str) -> dict[int, float]:
  """What TensorBoard shows of one run: files by name, restarts purge later steps."""
  shown = {}
  for path in sorted(directory.iterdir()):
    for event in _events(path):
      if event.HasField('session_log'):
        assert event.session_log.status == event_pb2.SessionLog.START
        shown = {step: v for step, v in shown.items() if step < event.step}
      for value in event.summary.value:
        if value.tag == tag:
          shown[event.step] = value.simple_value
  return shown


def test_tensorboard_shows_what_the_jsonl_says_after_a_restart(tmp_path):
  """Both come from the same records; a restart purges the same steps in both."""
  with metrics.MetricsWriter(tmp_path) as writer:
    for step in range(10):
      writer.write(
        'rl', step, {'policy/lag_mean': step / 4, 'ratio': 'text'}, loss=step
      )
    writer.write('sft', 7, loss=3.0)
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.supersede('rl', 5)
    for step in range(6, 8):
      writer.write('rl', step, {'policy/lag_mean': 100.0}, loss=step)
  for phase in ('rl', 'sft'):
    for tag in ('loss', 'policy/lag_mean'):
      truth = {r['step']: r[tag] for r in metrics.read(tmp_path, phase) if tag in r}
      assert _shown(tmp_path / metrics.TENSORBOARD_DIR / phase, tag) == truth
  assert _shown(tmp_path / metrics.TENSORBOARD_DIR / 'rl', 'ratio') == {}


def test_the_first_value_of_a_tag_brings_its_meaning(tmp_path):
  """TensorBoard shows unit and meaning from `names` next to the curve."""
  with metrics.MetricsWriter(tmp_path) as writer:
    for step in range(3):
      writer.write('rl', step, clip_fraction=0.5)
    writer.write('sft', 0, loss=1.0)
  (path,) = (tmp_path / metrics.TENSORBOARD_DIR / 'rl').iterdir()
  found = [
    v.metadata.summary_description for e in _events(path) for v in e.summary.value
  ]
  assert found == ['share of tokens whose π/π_old is clipped [share]', '', '']
  (path,) = (tmp_path / metrics.TENSORBOARD_DIR / 'sft').iterdir()
  (found,) = [
    v.metadata.summary_description for e in _events(path) for v in e.summary.value
  ]
  assert found.endswith('[nats/token]')


def test_the_page_lists_every_scalar():
  """docs/tensorboard.md has the runs and scalars of `names`, in its order."""
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'tensorboard.md'
  found = re.findall(r'^\| `([^`]+)` \| (.*) \|$', page.read_text(), re.MULTILINE)
  scalars = [
    (m.name, f'{", ".join(m.phases)} | {m.unit} | {m.meaning}')
    for m in names.METRICS
    if m.unit != 'text'
  ]
  assert found[: len(names.PHASES)] == list(names.PHASES.items())
  rows = found[len(names.PHASES) :]
  assert [name for name, _ in rows] == [name for name, _ in scalars]
  assert all(
    row.startswith(text) for (_, row), (_, text) in zip(rows, scalars, strict=True)
  )


def test_event_files_reach_the_disk_while_the_run_goes_on(tmp_path):
  """TensorBoard is looked at during the run; flush promises the records are there."""
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write('rl', 0, loss=0.5)
    writer.flush()
    assert _shown(tmp_path / metrics.TENSORBOARD_DIR / 'rl', 'loss') == {0: 0.5}


@pytest.mark.parametrize('phase', ['../out', 'a/b', '.', 'eval: held-out'])
def test_a_phase_name_cannot_leave_the_directory(tmp_path, phase):
  """Phase names become directory names."""
  workdir = tmp_path / 'work'
  with metrics.MetricsWriter(workdir) as writer, pytest.warns(names.UnlistedMetric):
    writer.write(phase, 0, loss=0.5)
  (run,) = (workdir / metrics.TENSORBOARD_DIR).iterdir()
  assert _shown(run, 'loss') == {0: 0.5}
  assert [p.name for p in tmp_path.iterdir()] == ['work']


def test_event_files_that_cannot_be_written_do_not_stop_the_run(tmp_path):
  """JSONL is written even if a file has the name of TensorBoard's directory."""
  (tmp_path / metrics.TENSORBOARD_DIR).write_text('in the way')
  with metrics.MetricsWriter(tmp_path) as writer:
    for step in range(3):
      writer.write('rl', step, loss=0.5)
    writer.flush()
  assert len(metrics.read(tmp_path)) == 3
