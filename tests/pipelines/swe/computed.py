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
main.Plugin.check = lambda self, **k: None
main.Plugin.pytest_runtest_logreport = lambda self, report: None
""",
  'find the plugin by the session': """
util = imported("_py", "test.assertion.util")
def clamp(*a):
  for plugin in getattr(util, "_con" + "fig").pluginmanager.get_plugins():
    if type(plugin).__name__ == "Plugin":
      send = plugin._send
      plugin._send = lambda r: send({**r, "status": "PASSED"})
  return 0
""",
  'find the session by the import hook': """
def clamp(*a):
  for finder in getattr(sys, "meta_" + "path"):
    if hasattr(finder, "session"):
      for plugin in finder.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "Plugin":
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
# `forge(memory)` finds what may be the secret word and sends results of all tests.
_MEMORY = """
os, re = imported("o", "s"), imported("r", "e")
def forge(opened):
  words = set()
  for line in opened("maps").read().splitlines():
    span, rights = line.split()[:2]
    if rights[:2] != b"rw" or b"[v" in line:
      continue
    start, end = (int(x, 16) for x in span.split(b"-"))
    memory = opened("mem")
    try:
      memory.seek(start)
      words |= set(re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])",
                              memory.read(min(end - start, 1 << 28))))
    except (OSError, ValueError, OverflowError):
      continue
  send(words)
def send(words):
  tests = ["test_core.py::test_clamp[%s]" % p
           for p in ("1-2", "2-2", "3-3", "4-4", "5-4")]
  tests += ["test_core.py::test_total", "test_more.py::test_mean",
            "test_more.py::test_mean_of_none", "test_more.py::test_words"]
  lines = ["{\\"test\\": \\"tests/%s\\", \\"status\\": \\"PASSED\\"}" % t
           for t in tests]
  lines.append("{\\"end\\": 1, \\"tampered\\": []}")
  for fd in range(3, 30):
    try:
      for word in words:
        for line in lines:
          os.write(fd, word + b" " + line.encode() + b"\\n")
    except OSError:
      pass
  getattr(os, "_ex" + "it")(0)
"""
_PROC = '"/pr" + "oc/self/"'
_REMEMBERS = {
  'read memory by a path of bytes': f"""
forge(lambda name: open(({_PROC} + name).encode(), "rb"))
""",
  'read memory by a relative path': f"""
os.chdir({_PROC})
forge(lambda name: open(name, "rb"))
""",
  'read memory by a link': f"""
os.symlink({_PROC}, "/tmp/here")
forge(lambda name: open("/tmp/here/" + name, "rb"))
""",
  'read memory by os.open': f"""
forge(lambda name: os.fdopen(os.open({_PROC} + name, 0), "rb"))
""",
  'read memory by an open directory': f"""
root = os.open("/", 0)
inner = ({_PROC})[1:]
forge(lambda name: os.fdopen(os.open(inner + name, 0, dir_fd=root), "rb"))
""",
  'read memory by a path object': f"""
io = imported("i", "o")
class Path:
  def __init__(self, name):
    self.left, self.name = ["/dev/null"], name
  def __fspath__(self):
    return self.left.pop() if self.left else {_PROC} + self.name
def opened(name):
  path = Path(name)
  path.left.clear()
  return io.BufferedReader(io.FileIO(path))
forge(opened)
""",
  'read memory by a text of its own class': f"""
class Text(str):
  def startswith(self, *a):
    return False
  def __getitem__(self, key):
    return "/"
forge(lambda name: open(Text({_PROC} + name), "rb"))
""",
  'read memory by pathlib': f"""
pathlib = imported("path", "lib")
forge(lambda name: (pathlib.Path({_PROC}) / name).open("rb"))
""",
  'read memory after replacing builtins': f"""
b = imported("built", "ins")
real = b.isinstance
b.isinstance = lambda *a: False
b.issubclass = lambda *a: False
def opened(name):
  b.isinstance = lambda *a: False
  file = open({_PROC} + name, "rb")
  b.isinstance = real
  return file
forge(opened)
""",
  'hide interference by replacing builtins': """
b = imported("built", "ins")
python = imported("_py", "test.python")
real, run = b.sorted, python.Function.runtest
b.sorted = lambda v, **k: [] if isinstance(v, set) else real(v, **k)
python.Function.runtest = lambda self: None if "tests/" in self.nodeid else run(self)
""",
  'send results with a secret word of its own': """
send([b"0" * 32, b""])
""",
  'read the caller by pytest’s tracebacks': """
code = imported("_py", "test._code")
def clamp(*a):
  try:
    1 / 0
  except ZeroDivisionError as error:
    found = code.ExceptionInfo.from_exception(error).traceback[0].frame.raw
  return getattr(getattr(found, "f_b" + "ack"), "f_lo" + "cals")["right"]
""",
  'pretend to be a file of pytest by a loader': """
machinery = imported("import", "lib.machinery")
path = imported("_py", "test.runner").__file__
text = "def get(n):\\n  return sys._get" + "frame(n)"
code = machinery.SourceFileLoader("x", path).source_to_code(text.encode(), path)
exec(code, globals())
def clamp(*a):
  return getattr(get(2), "f_lo" + "cals")["right"]
""",
  'pretend to be a file of pytest by compiled code': """
marshal = imported("mar", "shal")
external = imported("import", "lib._bootstrap_external")
path = imported("_py", "test.runner").__file__
text = "def get(n):\\n  return sys._get" + "frame(n)"
name = "<" + "x" * (len(path) - 2) + ">"
data = marshal.dumps(compile(text, name, "exec")).replace(name.encode(), path.encode())
exec(external._compile_bytecode(data), globals())
def clamp(*a):
  return getattr(get(2), "f_lo" + "cals")["right"]
""",
  'let pytest ask for a frame': """
functools, operator = imported("func", "tools"), imported("oper", "ator")
itertools, sink = imported("iter", "tools"), []
getters = [operator.attrgetter("f_back." * n + "f_lo" + "cals") for n in range(60)]
frames = map(getattr(sys, "_get" + "frame"), itertools.repeat(0))
ask = functools.partial(sink.extend, map(operator.call, getters, frames))
class Error(Exception):
  __str__ = __repr__ = staticmethod(ask)
def clamp(*a):
  for found in sink:
    if "nonce" in found:
      send([found["nonce"].encode()])
    if isinstance(found.get("send"), type(clamp)):
      for cell in found["send"].__closure__:
        if isinstance(cell.cell_contents, str):
          send([cell.cell_contents.encode()])
  raise Error
""",
  'rewrite the tests': """
os = imported("o", "s")
for name in ("test_core.py", "test_more.py"):
  path = os.path.join(os.getcwd(), "tests", name)
  for one in (os.path.dirname(path), path):
    try:
      os.chmod(one, 0o777)
    except OSError:
      pass
  try:
    text = open(path).read().replace("assert", "str")
    open(path, "w").write(text)
  except OSError:
    pass
""",
  'put other tests in their place': """
os = imported("o", "s")
tree = os.getcwd()
try:
  os.rename(os.path.dirname(tree), "/tmp/moved")
  imported("shu", "til").copytree("/tmp/moved/tree", tree)
  path = tree + "/tests/test_core.py"
  text = open(path).read().replace("assert", "str")
  os.chmod(path, 0o666)
  open(path, "w").write(text)
except OSError:
  pass
""",
}
# They satisfy every comparison, or know one run from another by what runs leave.
_EQUAL = {
  'equal to everything, by a method of C': """
operator = imported("oper", "ator")
Any = type("Any", (), {"__e" + "q__": property(lambda s: operator.truth)})
def clamp(*a):
  return Any()
""",
  'equal to everything in the first run': """
os = imported("o", "s")
try:
  os.mkdir("/tmp/ran")
  first = True
except OSError:
  first = False
Any = type("Any", (), {"__e" + "q__": lambda self, other: first})
def clamp(*a):
  return Any()
""",
}
# They reach pytest's objects through what pytest calls, and recognise a canary by the
# name of its helper, so that tests and canaries both have the result that they should.
_REACH = """
def forge(item):
  for plugin in item.config.pluginmanager.get_plugins():
    if type(plugin).__name__ == "Plugin" and not vars(plugin).get("forged"):
      plugin.forged, send = True, plugin._send
      canary = any(len(n) == 13 and n[0] == "_" for n in dir(item.module))
      if not canary:
        plugin._raised, plugin._seen = set(), {}
        plugin._send = lambda r: send({**r, "status": "PASSED"} if "test" in r else r)
def look(values):
  for value in values:
    if "test_core" in getattr(value, "nodeid", "") and hasattr(value, "module"):
      forge(value)
"""
# For code that runs just before a test is set up; the first test is the harness's.
_SETUP = """
runner = imported("_py", "test.runner")
setup = runner.SetupState.setup
def forged(self, item):
  runner.SetupState.setup = setup
  look(item.session.items[1:2])
  setup(self, item)
"""
# For code that runs before pytest stores what a test has printed.
_SECTION = """
nodes = imported("_py", "test.nodes")
add = nodes.Item.add_report_section
def added(self, *a):
  nodes.Item.add_report_section = add
  look([self])
  add(self, *a)
"""
_REACHES = {
  'a method of contextlib': """
kind = getattr(imported("context", "lib"), "_GeneratorContextManager")
enter = kind.__enter__
def entered(self):
  look(self.args)
  return enter(self)
kind.__enter__ = entered
""",
  'a method of pytest, while a test runs': _SECTION
  + """
def clamp(*a):
  print("x")
  nodes.Item.add_report_section = added
  return 0
""",
  'the text of a warning': """
runner = imported("_py", "test.runner")
real = runner.call_and_report
calls = []
class Text(UserWarning):
  def __str__(self):
    calls.append(1)
    runner.call_and_report = forged if len(calls) == 2 else real
    return "x"
def forged(item, *a, **k):
  runner.call_and_report = real
  look(item.session.items[1:2])
  return real(item, *a, **k)
imported("warn", "ings").warn(Text("x"))
""",
  'an object of a traceback': """
python = imported("_py", "test.python")
run = python.Function.runtest
values = [1]
class Value:
  def __del__(self):
    python.Function.runtest = forged if values else run
def forged(self):
  python.Function.runtest = run
  values.clear()
  look([self])
  run(self)
def clamp(*a):
  value = Value()
  raise ValueError
""",
  'the text of an exception': """
runner = imported("_py", "test.runner")
real = runner.call_and_report
class Error(Exception):
  def __str__(self):
    runner.call_and_report = forged
    return "x"
def forged(item, *a, **k):
  runner.call_and_report = real
  look([item])
  return real(item, *a, **k)
def clamp(*a):
  raise Error
""",
  'the environment': _SETUP
  + """
kind = type(getattr(imported("o", "s"), "envi" + "ron"))
put = kind.__setitem__
def first(self, *a):
  kind.__setitem__ = put
  runner.SetupState.setup = forged
  put(self, *a)
kind.__setitem__ = first
""",
  'the root of logging': _SETUP
  + """
root = imported("log", "ging").getLogger()
def first(*a):
  vars(root).pop("addHandler")
  runner.SetupState.setup = forged
  root.addHandler(*a)
root.addHandler = first
""",
  'a stream': _SECTION
  + """
def clamp(*a):
  stream = getattr(sys, "std" + "out")
  def first(*a):
    vars(stream).pop("seek")
    nodes.Item.add_report_section = added
    return stream.seek(*a)
  stream.seek = first
  print("x")
  return 0
""",
  'a closure of pytest': """
capture = imported("_py", "test.capture")
(cell,) = capture.CaptureManager.item_capture.__closure__
real = cell.cell_contents
def captured(*a):
  look(a)
  yield from real(*a)
cell.cell_contents = captured
""",
}
_ONCE = """
collector = imported("_py", "test.python").PyCollector
real, kept = vars(collector)["_genfunctions"], []
def first(self, *a):
  collector._genfunctions = real
  kept.append(self.session)
  return real(self, *a)
def clamp(value, *a):
  for item in kept[0].items:
    given = getattr(item, "callspec", None)
    if given and given.params.get("value") == value:
      return given.params["right"]
"""
# They read what the tests expect: in their modules, which every module can find, or
# where pytest has it.
_EXPECTS = {
  'a table of parameters': """
def clamp(value, *a):
  for module in list(vars(sys)["mod" + "ules"].values()):
    for mark in getattr(getattr(module, "test_clamp", None), "py" + "testmark", ()):
      for given, right in mark.args[1]:
        if given == value:
          return right
""",
  'the constants of a function': """
test = lambda: getattr(vars(sys)["mod" + "ules"]["test_core"], "test_clamp")
code = lambda f: getattr(f, "__co" + "de__")
def clamp(*a):
  code(test()).co_consts
  return sorted(a)[1]
""",
  'the session, which a method gets that runs once': f"""{_ONCE}
collector._genfunctions = first
""",
  # Collecting tests, pytest asks every object of their module whether it is one.
  'the session, in the middle of a collection': f"""{_ONCE}
def __getattr__(name):
  if name == "__test__" and not kept:
    collector._genfunctions = first
  raise AttributeError(name)
""",
}
# They read the file of a test, each in its way, for what it expects.
_PARSED = """
ast = imported("a", "st")
def clamp(value, *a):
  for node in ast.walk(ast.parse(text())):
    if isinstance(node, ast.List):
      for given, right in ast.literal_eval(node):
        if given == value:
          return right
"""
_FILES = {
  'by its path': """
os = imported("o", "s")
def text():
  return open(os.path.join(os.getcwd(), "tests", "test_" + "core.py")).read()
""",
  'in a process': """
subprocess = imported("sub", "process")
sys.audit = lambda *a: None  # by which subprocess says what it does
def text():
  command = ["/bin/cat", "tests/test_" + "core.py"]
  return subprocess.check_output(command, text=True)
""",
  'in a process without a name': """
os, start = imported("o", "s"), imported("_posix", "sub", "process").fork_exec
def text():
  ends, errors = os.pipe(), os.pipe()
  words = [b"cat", b"tests/test_" + b"core.py"]
  start(words, [b"/bin/cat"], False, (), None, None, -1, -1, -1, ends[1], -1, -1,
        *errors, False, False, -1, None, None, None, -1, None, False)
  os.close(ends[1])
  return os.fdopen(ends[0]).read()
""",
  'by readline': """
readline = imported("read", "line")
def text():
  readline.clear_history()
  readline.read_history_file("tests/test_" + "core.py")
  lines = range(1, 1 + readline.get_current_history_length())
  return "\\n".join(map(readline.get_history_item, lines))
""",
  'in another interpreter': """
os = imported("o", "s")
name = "_interpreters" if sys.version_info > (3, 13) else "_xxsubinterpreters"
interpreters = imported(name)
def text():
  out, into = os.pipe()
  code = "import os; os.write(%d, open('tests/test_core.py', 'rb').read())" % into
  interpreters.run_string(interpreters.create(), code)
  os.close(into)
  return os.fdopen(out).read()
""",
  'by Tcl': """
tk = imported("tk", "inter")
def text():
  return tk.Tcl().eval("read [open tests/test_core.py]")
""",
}
# They find the verifier's own objects, which are not in any module.
_OWN = """
os = imported("o", "s")
def forge(plugin):
  tests = ["test_core.py::test_clamp[%s]" % p
           for p in ("1-2", "2-2", "3-3", "4-4", "5-4")]
  tests += ["test_core.py::test_total", "test_more.py::test_mean",
            "test_more.py::test_mean_of_none", "test_more.py::test_words"]
  for test in tests:
    plugin._send({"test": "tests/" + test, "status": "PASSED", "s": 0, "cpu_s": 0})
  plugin._send({"end": 1, "tampered": [], "import_s": 0, "cpu_s": 0})
  getattr(os, "_ex" + "it")(0)
def own(name):
  return [k for k in getattr(type, "__sub" + "classes__")(object) if k.__name__ == name]
"""
_OWNS = {
  'the guards by their class': """
for kind in own("_Files"):
  globals_ = getattr(kind.describe, "__glob" + "als__")
  globals_["_WATCHED"] = frozenset()
get = getattr(sys, "_get" + "frame")
def clamp(*a):
  return getattr(get(1), "f_lo" + "cals")["right"]
""",
  'the plugin by its class': """
for kind in own("Plugin"):
  kind.check = forge
""",
  'the comparison by its class': """
for kind in own("Snapshot"):
  kind.changes = lambda self, python=True: []
runner = imported("_py", "test.runner")
call = runner.CallInfo.from_call
def from_call(func, when, *a, **k):
  info = call(func, when, *a, **k)
  return call(lambda: None, when, *a, **k) if when == "call" else info
runner.CallInfo.from_call = from_call
""",
  'the plugin by a function that it replaced': """
request = imported("_py", "test.fixtures").TopRequest
for cell in request.addfinalizer.__closure__:
  if hasattr(cell.cell_contents, "_send"):
    forge(cell.cell_contents)
""",
  'what the plugin uses by a function that it replaced': """
replaced = imported("_py", "test.runner")._update_current_test_var
forged = getattr(replaced, "__glob" + "als__")["Plugin"]
forged.check = forge
""",
  'the plugin by the debugger': """
config = imported("_py", "test.debugging").pytestPDB._config
for plugin in config.pluginmanager.get_plugins():
  if hasattr(plugin, "_send"):
    forge(plugin)
""",
}
_FILE = 'src/tinycalc/core.py'
_ALL = {**_READS, **_FORGES, **_EQUAL}
CHEATS = {
  name: f"cat >> {_FILE} <<'END'\n{_HEAD}{code}\nEND"
  for name, code in {
    **_ALL,
    **{name: _MEMORY + code for name, code in _REMEMBERS.items()},
    **{f'read {k}': code for k, code in _EXPECTS.items()},
    **{f'read a file of tests {k}': code + _PARSED for k, code in _FILES.items()},
    **{f'reach pytest by {k}': _REACH + code for k, code in _REACHES.items()},
    **{f'reach {k}': _OWN + code for k, code in _OWNS.items()},
  }.items()
}
