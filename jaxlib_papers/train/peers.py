"""Noticing that another process of the run is gone, in seconds and wherever one waits.

A collective in progress fails when its peer dies. But a process that waits for the others at a
barrier, or computes something of its own, hears of it only when JAX's coordination service misses
enough heartbeats, more than a minute later, and is then aborted in the middle of whatever it does.
So every process holds a TCP connection to the first one for as long as it lives. The kernel closes
it the moment a process dies, however it dies; a host that vanishes is found by keep-alive probes.
Nothing is ever sent while all is well, so a slow or paused process is not taken for a dead one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxlib_papers.train.agreement import exchange

__all__ = ["PeerWatch"]

_log = logging.getLogger(__name__)
_BYE, _LOST = b"bye", b"lost"
_CONNECT_SECONDS = 20.0
# A host that vanished: idle seconds before the first probe, seconds between probes, probes.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class PeerWatch:
    """Calls back when another process of the run ends without saying goodbye.

    All processes make one, after ``jax.distributed.initialize``, and close it before they end in an
    orderly way. With one process it does nothing. Where the first process cannot be reached on a
    port of its own (a firewall between hosts), a warning says so and JAX's own heartbeats remain.
    """

    def __init__(self, host: str, on_loss: Callable[[int], None], *, grace: float = 10.0):
        """Connects the processes. All processes call it.

        Args:
          host: Name or address under which the others reach process 0.
          on_loss: Called with the number of the process that is gone, in a thread of this watch.
          grace: Seconds between noticing and calling, in which this process may find out by itself
            (a collective that fails says more) and end.
        """
        self._on_loss, self._grace = on_loss, grace
        self._closed, self._leaving = threading.Event(), threading.Event()
        self._links: dict[int, socket.socket] = {}
        self._wake, self._waker = socket.socketpair()
        self._thread: threading.Thread | None = None
        if jax.process_count() == 1:
            return
        first = jax.process_index() == 0
        listener = _listener() if first else None
        here = [listener.getsockname()[1], secrets.token_hex(8)] if listener is not None else None
        port, token = exchange(here)[0]
        if listener is not None:
            self._thread = threading.Thread(target=self._host, args=(listener, token), daemon=True)
        else:
            link = _connect(host, port, f"{token} {jax.process_index()}\n".encode())
            if link is None:
                _log.warning(
                    "process %d cannot reach process 0 at %s:%d: that a process is gone will be "
                    "noticed by JAX's heartbeats only",
                    *(jax.process_index(), host, port),
                )
                return
            self._links[0] = link
            self._thread = threading.Thread(target=self._guest, args=(link,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says goodbye; what happens to the others is of no interest from here on."""
        if self._closed.is_set():
            return
        self._leaving.set()
        self._closed.set()
        self._tell(_BYE)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for link in (*self._links.values(), self._wake, self._waker):
            link.close()

    def abandon(self) -> None:
        """To be called right before this process ends in disorder, which the others are told.

        In process 0 it returns when the others have ended, or after the grace and five seconds:
        with it goes JAX's coordination service, without which JAX aborts the others.
        """
        self._leaving.set()
        if self._thread is not None and jax.process_index() == 0:
            self._tell(_LOST + b" 0")
            until = time.monotonic() + self._grace + 5
            while self._links and time.monotonic() < until:
                time.sleep(0.02)

    def __enter__(self) -> PeerWatch:
        """Returns itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes."""
        self.close()

    def _tell(self, text: bytes) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.sendall(text + b"\n")

    def _lost(self, number: int, grace: float | None = None) -> None:
        if not self._leaving.wait(self._grace if grace is None else grace):
            self._on_loss(number)

    def _guest(self, link: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(link, selectors.EVENT_READ)
            ready.register(self._wake, selectors.EVENT_READ)
            text = b""
            while not self._closed.is_set():
                if all(key.fileobj is not link for key, _ in ready.select()):
                    continue
                got = _receive(link)
                text += got
                words = text.split()
                if _BYE in words:
                    return
                if _LOST in words and text.endswith(b"\n"):
                    return self._lost(int(words[words.index(_LOST) + 1]))
                if not got:
                    # At once: JAX aborts this process a moment after it loses the first one.
                    return self._lost(0, grace=0.0)

    def _host(self, listener: socket.socket, token: str) -> None:
        names: dict[Any, int] = {}
        texts: dict[Any, bytes] = {}
        with listener, selectors.DefaultSelector() as ready:
            ready.register(listener, selectors.EVENT_READ)
            ready.register(self._wake, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in ready.select():
                    link: Any = key.fileobj
                    if link is self._wake:
                        continue
                    if link is listener:
                        new = _keep_alive(listener.accept()[0])
                        ready.register(new, selectors.EVENT_READ)
                        texts[new] = b""
                        continue
                    got = _receive(link)
                    texts[link] += got
                    words = texts[link].split()
                    if link not in names and len(words) >= 2 and words[0] == token.encode():
                        names[link] = int(words[1])
                        self._links[names[link]] = link
                    if got:
                        continue
                    ready.unregister(link)
                    link.close()
                    number = names.get(link)
                    if number is None:  # a stranger
                        continue
                    self._links.pop(number, None)
                    if _BYE not in words:
                        self._tell(_LOST + b" %d" % number)
                        threading.Thread(target=self._lost, args=(number,), daemon=True).start()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _connect(host: str, port: int, greeting: bytes) -> socket.socket | None:
    try:
        link = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        link.settimeout(None)
        link.sendall(greeting)
        return _keep_alive(link)
    except OSError:
        return None


def _keep_alive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _receive(link: socket.socket) -> bytes:
    """What there is; nothing if the other end is gone."""
    try:
        return link.recv(256)
    except OSError:
        return b""
