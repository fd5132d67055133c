"""A port in a sandbox's network that code outside serves."""

from __future__ import annotations

import asyncio
import socket

import pytest

from m2jax import sandbox

ASK = 'exec 3<>/dev/tcp/127.0.0.1/8080 && echo {word} >&3 && head -n1 <&3'


async def served(listener: socket.socket, name: str, heard: list):
  """Serves a socket: remembers lines with `name`, and answers with it."""

  async def answer(reader, writer):
    heard.append((name, (await reader.readline()).decode().strip()))
    writer.write(f'{name}\n'.encode())
    writer.close()

  listener.setblocking(False)
  return await asyncio.start_server(answer, sock=listener)


def test_each_sandbox_reaches_its_own_listener(run, make):
  """The same port in two sandboxes; the connection tells who called."""
  boxes, heard = [make(), make()], []

  async def both():
    servers = [
      await served(await box.listen(8080), name, heard)
      for box, name in zip(boxes, 'ab', strict=True)
    ]
    results = await asyncio.gather(
      *(box.exec(ASK.format(word=w)) for box, w in zip(boxes, 'xy', strict=True))
    )
    for server in servers:
      server.close()
    return [result.stdout for result in results]

  assert run(both()) == ['a\n', 'b\n']
  assert sorted(heard) == [('a', 'x'), ('b', 'y')]


def test_nobody_else_can_connect(run, make):
  """Neither another sandbox nor a process of this machine."""
  box, other = make(), make()

  async def attempts():
    with await box.listen(8080) as listener:
      assert listener.getsockname() == ('127.0.0.1', 8080)
      result = await other.exec(ASK.format(word='z'))
      with pytest.raises(ConnectionRefusedError):
        socket.create_connection(('127.0.0.1', 8080), timeout=1).close()
      return result.returncode

  assert run(attempts()) != 0


def test_a_listener_ends_with_its_sandbox(run):
  """The next sandbox gets the network, and finds nobody listening in it."""

  async def two():
    first = await sandbox.create()
    listener = await first.listen(8080)
    await first.destroy()
    second = await sandbox.create()
    refused = await second.exec(ASK.format(word='z'))
    (await second.listen(8080)).close()  # the port is free
    await second.destroy()
    listener.close()
    with pytest.raises(sandbox.SandboxError, match='destroyed'):
      await second.listen(8080)
    return refused.returncode

  assert run(two()) != 0


def test_a_port_in_use_is_an_error_of_the_call(run, make):
  box = make()

  async def twice():
    with await box.listen(8080):
      with pytest.raises(sandbox.SandboxError, match='in use'):
        await box.listen(8080)
    return (await box.exec('echo fine')).stdout

  assert run(twice()) == 'fine\n'


def test_cancelled_callers_get_nobody_elses_socket(run, make):
  """Sockets are matched to their requests, whatever was cancelled in between."""
  box = make()

  async def many():
    asked = [asyncio.ensure_future(box.listen(9000 + i)) for i in range(8)]
    await asyncio.sleep(0)
    for task in asked[::2]:
      task.cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    ports = [s.getsockname()[1] for s in found if isinstance(s, socket.socket)]
    for s in found:
      if isinstance(s, socket.socket):
        s.close()
    return ports

  assert run(many()) == [9001, 9003, 9005, 9007]
