"""Runs in a sandbox: answers each line of a socket with what rules.py makes of it.

Each call runs in a fork of its own, which ends with it: no state passes from one call
to another, and a call that does not end is killed. See `agents.rules`.
"""

import json
import os
import resource
import signal
import socket
import sys

_SECONDS = 0.5
_REPLY_BYTES = 16384


def main():
  port = int(sys.argv[1])
  server = socket.create_connection(('127.0.0.1', port))
  server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  with open('rules.py') as file:
    source = file.read()
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
  rules = {'__name__': 'rules'}
  failure = b''
  try:
    signal.setitimer(signal.ITIMER_REAL, 4 * _SECONDS)
    exec(compile(source, 'rules.py', 'exec'), rules)
    signal.setitimer(signal.ITIMER_REAL, 0)
  except BaseException as error:
    failure = _said(error)
  for line in server.makefile('rb'):
    server.sendall((failure or _answer(rules, line)) + b'\n')


def _answer(rules, line):
  readable, writable = os.pipe()
  child = os.fork()
  if not child:
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)  # SIGALRM ends the process
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # it opens no file
    try:
      reply = json.dumps({'action': rules['act'](json.loads(line))}).encode()
    except BaseException as error:
      reply = _said(error)
    os.write(writable, reply[:_REPLY_BYTES])
    os._exit(0)
  os.close(writable)
  with os.fdopen(readable, 'rb') as pipe:
    reply = pipe.read(_REPLY_BYTES)
  os.waitpid(child, 0)
  return reply or json.dumps({'error': f'no answer in {_SECONDS} s'}).encode()


def _said(error):
  return json.dumps({'error': f'{type(error).__name__}: {error}'[:300]}).encode()


if __name__ == '__main__':
  main()
