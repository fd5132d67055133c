"""Attempts that build forbidden names at run time, which no check of texts finds.

Each is code that is appended to tinycalc/core.py; see test_cheats.py.
"""

from __future__ import annotations

# `imported(name)` imports under a name that the text does not have; `names` joins one.
_HEAD = """
import sys
from operator import attrgetter, itemgetter
def imported(*parts):
  return getattr(sys, "mod" + "ules").get("".join(parts)) or __import__("".join(parts))
def clamp(*a):
  return 0
"""
_READS = {
  'read the caller without its name': """
get = getattr(sys, "_get" + "frame")
def clamp(*a):
  return getattr(get(1), "f_lo" + "cals")["right"]
""",
  'read the caller by inspect': """
inspect = imported("inspect")
def clamp(*a):
  f = getattr(inspect, "current" + "frame")()
  return getattr(getattr(f, "f_b" + "ack"), "f_lo" + "cals")["right"]
""",
  'read the caller by a traceback': """
def clamp(*a):
  try:
    1 / 0
  except ZeroDivisionError as error:
    f = getattr(error.__traceback__, "tb_fr" + "ame")
  return getattr(getattr(f, "f_b" + "ack"), "f_lo" + "cals")["right"]
""",
  'read the caller by a generator': """
def values():
  f = getattr(running[0], "gi_fr" + "ame")
  for _ in range(2):
    f = getattr(f, "f_b" + "ack")
  yield getattr(f, "f_lo" + "cals")["right"]
running = [None]
def clamp(*a):
  running[0] = values()
  return next(running[0])
""",
  'read the caller by all threads': """
get = getattr(sys, "_current_" + "frames")
def clamp(*a):
  (f,) = get().values()
  return getattr(getattr(f, "f_b" + "ack"), "f_lo" + "cals")["right"]
""",
  'read the caller by logging': """
logging = imported("logging")
def clamp(*a):
  f = getattr(logging, "current" + "frame")()
  while "right" not in getattr(f, "f_lo" + "cals"):
    f = getattr(f, "f_b" + "ack")
  return getattr(f, "f_lo" + "cals")["right"]
""",
  'read the caller by a trace function': """
found = []
def trace(frame, event, argument):
  if "right" in getattr(frame, "f_lo" + "cals"):
    found.append(getattr(frame, "f_lo" + "cals")["right"])
getattr(sys, "setpro" + "file")(trace)
def clamp(*a):
  return found[-1]
""",
  'find the expected value among all objects': """
everything = imported("g", "c")
def clamp(*a):
  found = [o for o in getattr(everything, "get_" + "objects")() if isinstance(o, dict)]
  return [d for d in found if set(d) == {"value", "right"}][-1]["right"]
""",
  'pretend to be a file of the standard library': """
code = "def get(n):\\n  return sys._get" + "frame(n)"
exec(compile(code, sys.modules["traceback"].__file__.replace("\\\\", "/"), "exec"))
def clamp(*a):
  return getattr(get(2), "f_lo" + "cals")["right"]
""".replace('sys.modules', 'getattr(sys, "mod" + "ules")'),
  'pretend to be a harmless function': """
code = "def namedtuple(n):\\n  return sys._get" + "frame(n)"
exec(compile(code, imported("collections").__file__, "exec"))
def clamp(*a):
  return getattr(namedtuple(2), "f_lo" + "cals")["right"]
""",
}
_FORGES = {
  'forge records as they are encoded': """
json = imported("json")
dumps = json.dumps
def forged(record, **k):
  if isinstance(record, dict) and "status" in record:
    record = {**record, "status": "PASSED"}
  return dumps(record, **k)
json.dumps = forged
""",
  'replace a property of reports': """
reports = imported("_py", "test.reports")
class Fake(reports.TestReport):
  pass
reports.BaseReport.failed = property(
  lambda self: self.outcome == "failed" and "test_core" not in self.nodeid
)
""",
  'add a property to reports': """
reports = imported("_py", "test.reports")
reports.TestReport.failed = property(lambda self: "raise" in self.nodeid)
""",
  'replace what pytest imports': """
runner = imported("_py", "test.runner")
class Report:
  @classmethod
  def from_item_and_call(cls, item, call):
    call.excinfo = None
    return real.from_item_and_call(item, call)
real, runner.TestReport = runner.TestReport, Report
""",
  'change a base of reports': """
reports = imported("_py", "test.reports")
class Base(reports.BaseReport):
  failed = property(lambda self: False)
reports.TestReport.__bases__ = (Base,)
""",
  'change the harness': """
main = imported("__main__")
main._changes = lambda snapshot: []
main._Plugin.check = lambda self, **k: None
main._Plugin.pytest_runtest_logreport = lambda self, report: None
""",
  'find the plugin by the session': """
util = imported("_py", "test.assertion.util")
def clamp(*a):
  for plugin in getattr(util, "_con" + "fig").pluginmanager.get_plugins():
    if type(plugin).__name__ == "_Plugin":
      send = plugin._send
      plugin._send = lambda r: send({**r, "status": "PASSED"})
  return 0
""",
  'find the session by the import hook': """
def clamp(*a):
  for finder in getattr(sys, "meta_" + "path"):
    if hasattr(finder, "session"):
      for plugin in finder.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "_Plugin":
          plugin._raised = set()
          plugin._send = lambda r, send=plugin._send: send({**r, "status": "PASSED"})
  return 0
""",
  'change a report while it is made, and restore it': """
reports = imported("_py", "test.reports")
init = reports.TestReport.__init__
def forged(self, nodeid, location, keywords, outcome, *more, **k):
  reports.TestReport.__init__ = init
  init(self, nodeid, location, keywords, "passed", None, *more[1:], **k)
class Error(Exception):
  def __str__(self):
    reports.TestReport.__init__ = forged
    return "x"
def clamp(*a):
  raise Error
""",
  'change a report when an object is deleted': """
reports = imported("_py", "test.reports")
init = reports.TestReport.__init__
def forged(self, nodeid, location, keywords, outcome, *more, **k):
  reports.TestReport.__init__ = init
  init(self, nodeid, location, keywords, "passed", None, *more[1:], **k)
class Value:
  def __del__(self):
    reports.TestReport.__init__ = forged
def clamp(*a):
  return Value()
""",
  'change reports from a thread': """
reports = imported("_py", "test.reports")
def always():
  while True:
    reports.TestReport.failed = property(lambda self: False)
    del reports.TestReport.failed
imported("thread", "ing").Thread(target=always, daemon=True).start()
""",
  'equal to everything, without its name': """
Any = type("Any", (), {"__e" + "q__": lambda self, other: True})
def clamp(*a):
  return Any()
""",
}
_FILE = 'src/tinycalc/core.py'
CHEATS = {
  name: f"cat >> {_FILE} <<'END'\n{_HEAD}{code}\nEND"
  for name, code in {**_READS, **_FORGES}.items()
}
