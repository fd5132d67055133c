"""The inside of `second_verifier_appdev`: apps are judged over the DevTools protocol.

Only the standard library is used, as the file runs in a sandbox, where request.json is:
name → (files, spec). Prints name → criterion → '' if it is met, or why not. Source:
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time

_CHROMIUM = '/usr/lib/chromium/chromium'
_ORIGIN = 'http://app.test'
_WAIT_S = 4.0
_FIELDS = ('textbox', 'combobox', 'checkbox', 'radio', 'spinbutton', 'searchbox')


class Failed(Exception):
  """A step is not met."""


class Pipe:
  """Chromium and its DevTools messages."""

  def __init__(self):
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    arguments = [_CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu']
    arguments += ['--remote-debugging-pipe', '--user-data-dir=/tmp/profile']
    arguments += ['--disable-dev-shm-usage', '--no-first-run', 'about:blank']
    # DevTools reads descriptor 3 and writes 4.
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    self._process = subprocess.Popen(
      ['bash', '-c', shell, 'bash', *arguments],
      pass_fds=(theirs_in, theirs_out),
      stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    self._out, self._in = ours_out, os.fdopen(ours_in, 'rb', 0)
    self._number, self._buffer, self.listeners = 0, b'', {}

  def send(self, method, session=None, **params):
    """Returns a call's result; events that arrive meanwhile go to the listeners."""
    self._number += 1
    mine = self._number
    self.post(method, session, mine, **params)
    while True:
      message = self.next()
      if message.get('id') == mine:
        if 'error' in message:
          raise Failed(f'{method}: {message["error"]["message"]}')
        return message['result']

  def post(self, method, session, number=None, **params):
    """Sends without waiting."""
    if number is None:
      self._number += 1
      number = self._number
    call = {'id': number, 'method': method, 'params': params}
    if session:
      call['sessionId'] = session
    os.write(self._out, json.dumps(call).encode() + b'\0')

  def next(self):
    while b'\0' not in self._buffer:
      data = self._in.read(1 << 16)
      if not data:
        raise RuntimeError('Chromium ended')
      self._buffer += data
    raw, _, self._buffer = self._buffer.partition(b'\0')
    message = json.loads(raw)
    if 'method' in message and (found := self.listeners.get(message['method'])):
      found(message)
    return message

  def close(self):
    self._process.kill()
    self._process.wait()


class Tab:
  """An app in a new browser context."""

  def __init__(self, pipe, files):
    self._pipe, self._files, self.errors, self._budget = pipe, files, [], False
    self._context = pipe.send('Target.createBrowserContext')['browserContextId']
    target = pipe.send(
      'Target.createTarget', url='about:blank', browserContextId=self._context
    )['targetId']
    attached = pipe.send('Target.attachToTarget', targetId=target, flatten=True)
    self._session = attached['sessionId']
    pipe.listeners = {
      'Fetch.requestPaused': self._answer,
      'Runtime.exceptionThrown': lambda m: self.errors.append('an exception'),
      'Log.entryAdded': self._logged,
      'Emulation.virtualTimeBudgetExpired': self._expired,
      'Page.loadEventFired': self._loaded,
    }
    for domain in ('Page', 'Runtime', 'Log', 'DOM', 'Accessibility'):
      self.call(f'{domain}.enable')
    self.call('Fetch.enable')
    self.load('Page.navigate', url=f'{_ORIGIN}/')

  def load(self, method, **params):
    self._load = False
    self.call(method, **params)
    end = time.monotonic() + 15
    while not self._load and time.monotonic() < end:
      self._pipe.next()
    self.pause(0.2)

  def pause(self, seconds):
    """Handles events for this number of seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      self.call('Runtime.evaluate', expression='0')
      time.sleep(0.02)

  def call(self, method, **params):
    return self._pipe.send(method, self._session, **params)

  def _loaded(self, _):
    self._load = True

  def _expired(self, _):
    self._budget = True

  def _logged(self, message):
    entry = message['params']['entry']
    if entry['level'] == 'error' and 'favicon' not in entry.get('url', ''):
      self.errors.append(entry['text'])

  def _answer(self, message):
    params = message['params']
    url = params['request']['url']
    path = url.removeprefix(_ORIGIN).partition('?')[0].lstrip('/') or 'index.html'
    data = self._files.get(path) if url.startswith(_ORIGIN) else None
    kinds = {'html': 'text/html', 'js': 'text/javascript', 'css': 'text/css'}
    kind = kinds.get(path.rpartition('.')[2], 'application/json')
    self._pipe.post(
      'Fetch.fulfillRequest',
      message['sessionId'],
      requestId=params['requestId'],
      responseCode=404 if data is None else 200,
      responseHeaders=[{'name': 'Content-Type', 'value': f'{kind}; charset=utf-8'}],
      body=base64.b64encode((data or '').encode()).decode(),
    )

  def freeze(self):
    self.call('Emulation.setVirtualTimePolicy', policy='pause')

  def advance(self, milliseconds):
    self._budget = False
    self.call('Emulation.setVirtualTimePolicy', policy='advance', budget=milliseconds)
    while not self._budget:
      self._pipe.next()

  # Elements: backend node ids --------------------------------------------------------

  def find(self, target):
    """Backend node ids of a target, in the order of the document."""
    inside = None
    if 'within' in target:
      (inside,) = self._one_of(self.find(target['within']))
    if 'testid' in target:
      return self._by_testid(target['testid'], inside)
    nodes = self.call('Accessibility.getFullAXTree')['nodes']
    allowed = None if inside is None else set(_below(nodes, inside))
    found = []
    for node in nodes:
      role = node.get('role', {}).get('value')
      name = node.get('name', {}).get('value', '')
      if node['ignored'] or (allowed is not None and node['nodeId'] not in allowed):
        continue
      if 'label' in target:
        fits = role in _FIELDS and name.strip() == target['label']
      else:
        fits = role == target['role'] and target.get('name', name) == name
      if fits:
        found.append(node['backendDOMNodeId'])
    return found

  def _by_testid(self, name, inside):
    root = self.call('DOM.getDocument', depth=0)['root']['nodeId']
    if inside is not None:
      (root,) = self.call(
        'DOM.pushNodesByBackendIdsToFrontend', backendNodeIds=[inside]
      )['nodeIds']
    ids = self.call(
      'DOM.querySelectorAll', nodeId=root, selector=f'[data-testid="{name}"]'
    )['nodeIds']
    described = (self.call('DOM.describeNode', nodeId=i)['node'] for i in ids)
    return [node['backendNodeId'] for node in described]

  def _one_of(self, found):
    if len(found) != 1:
      raise Failed(f'{len(found)} elements')
    return found

  def one(self, target):
    """Waits for exactly one element."""
    return self._one_of(self.until(lambda: self.find(target), lambda f: len(f) == 1))[0]

  def until(self, read, fits):
    """The first value that fits, or the last one."""
    end = time.monotonic() + _WAIT_S
    while True:
      value = read()
      if fits(value) or time.monotonic() > end:
        return value
      time.sleep(0.05)

  def on(self, node, function, *values):
    """Calls a function on a node; returns its value."""
    handle = self.call('DOM.resolveNode', backendNodeId=node)['object']['objectId']
    answer = self.call(
      'Runtime.callFunctionOn',
      functionDeclaration=function,
      objectId=handle,
      arguments=[{'value': value} for value in values],
      returnByValue=True,
    )
    return answer['result'].get('value')

  def click(self, node):
    self.call('DOM.scrollIntoViewIfNeeded', backendNodeId=node)
    quad = self.call('DOM.getContentQuads', backendNodeId=node)['quads'][0]
    x, y = sum(quad[0::2]) / 4, sum(quad[1::2]) / 4
    for kind in ('mousePressed', 'mouseReleased'):
      self.call(
        *('Input.dispatchMouseEvent',),
        **dict(type=kind, x=x, y=y, button='left', clickCount=1),
      )

  def close(self):
    self._pipe.send('Target.disposeBrowserContext', browserContextId=self._context)


def _below(nodes, backend):
  """Ids of the accessibility nodes below an element."""
  by_id = {node['nodeId']: node for node in nodes}
  queue = [n['nodeId'] for n in nodes if n.get('backendDOMNodeId') == backend]
  while queue:
    found = queue.pop()
    yield found
    queue += [c for c in by_id[found].get('childIds', ()) if c in by_id]


_TEXT = """function() {
  if (!this.checkVisibility({opacityProperty: true, visibilityProperty: true}))
    return null;
  return this.innerText;
}"""
_SELECT = """function(label) {
  const option = [...this.options].find((o) => o.text === label);
  if (!option) return false;
  this.value = option.value;
  this.dispatchEvent(new Event('input', {bubbles: true}));
  this.dispatchEvent(new Event('change', {bubbles: true}));
  return true;
}"""


def _words(text):
  return ' '.join((text or '').split())


def _act(tab, operation, target, values):
  if operation == 'reload':
    return tab.load('Page.reload')
  if operation == 'clock':
    return tab.advance(*values)
  node = tab.one(target)
  if operation == 'click':
    tab.click(node)
  elif operation == 'fill':
    tab.call('DOM.focus', backendNodeId=node)
    tab.on(node, 'function() { this.select(); }')
    if values[0]:
      tab.call('Input.insertText', text=values[0])
    else:
      for kind in ('keyDown', 'keyUp'):
        tab.call(
          *('Input.dispatchKeyEvent',),
          **dict(type=kind, key='Backspace', code='Backspace', windowsVirtualKeyCode=8),
        )
  elif operation == 'select' and not tab.on(node, _SELECT, *values):
    raise Failed(f'no option {values[0]!r}')
  elif operation == 'check':
    if tab.on(node, 'function() { return this.checked; }') != values[0]:
      tab.click(node)


def _reader(tab, operation, target):
  """The function that reads what an expectation is about."""
  if operation == 'texts':
    texts = lambda: [tab.on(node, _TEXT) for node in tab.find(target)]
    return lambda: [_words(t) for t in texts() if t is not None]
  if operation == 'count':
    return lambda: len(tab.find(target))
  function = {
    'text': _TEXT,
    'value': 'function() { return this.value; }',
    'checked': 'function() { return this.checked; }',
    'enabled': 'function() { return !this.disabled; }',
  }[operation]

  def read():
    found = tab.find(target)
    if len(found) != 1:
      return f'({len(found)} elements)'
    value = tab.on(found[0], function)
    return _words(value) if operation == 'text' else value

  return read


def judge(pipe, files, spec) -> dict[str, str]:
  """{criterion: '' if it is met, or why not}."""
  found = {}
  for criterion in spec['criteria']:
    tab = Tab(pipe, {**files, **criterion['files']})
    try:
      if spec['clock']:
        tab.freeze()
      for operation, target, *values in criterion['steps']:
        if operation in ('click', 'fill', 'select', 'check', 'reload', 'clock'):
          _act(tab, operation, target, values)
          continue
        wanted = values[0]
        value = tab.until(_reader(tab, operation, target), lambda v, w=wanted: v == w)
        if value != wanted:
          raise Failed(f'{operation} {target}: {value!r}, not {wanted!r}')
      found[criterion['id']] = '; '.join(tab.errors)
    except Failed as error:
      found[criterion['id']] = str(error)
    tab.close()
  return found


def _inside() -> None:
  """In the sandbox: judges request.json."""
  pipe = Pipe()
  try:
    with open('request.json', encoding='utf-8') as file:
      request = json.load(file)
    print(json.dumps({name: judge(pipe, *job) for name, job in request.items()}))
  finally:
    pipe.close()


if __name__ == '__main__':
  _inside()
