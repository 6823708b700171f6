"""A server that sends bytes back, in several ways, and its client."""

import os
import random
import select
import socket
import subprocess
import sys
import threading

CONNECTIONS = 4
BYTES = 300_000


def main():
    mode, host, port = sys.argv[1:]
    if mode == "client":
        return client(host, int(port))
    listener = socket.create_server((host, int(port)))
    print("listening")
    {"threads": threads, "fork": fork, "select": poller(use_select), "epoll": poller(use_epoll)}[mode](listener)


def echo(connection):
    while data := connection.recv(10_000):
        connection.sendall(data)
    connection.close()


def threads(listener):
    # A child that closes all descriptors before it becomes another program takes none away.
    subprocess.run(["true"], check=True)
    all = [threading.Thread(target=echo, args=[listener.accept()[0]]) for _ in range(CONNECTIONS)]
    subprocess.run(["true"], check=True)
    for thread in all:
        thread.start()
    for thread in all:
        thread.join()


def fork(listener):
    children = []
    for _ in range(CONNECTIONS):
        connection, _ = listener.accept()
        child = os.fork()
        if child == 0:
            listener.close()
            echo(connection)
            os._exit(0)
        connection.close()
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, status


class use_select:
    def __init__(self):
        self.all = {}

    def set(self, file, writes):
        self.all[file.fileno()] = writes

    def remove(self, file):
        del self.all[file.fileno()]

    def wait(self):
        writers = [fd for fd, writes in self.all.items() if writes]
        reads, writes, _ = select.select(list(self.all), writers, [])
        return [(fd, fd in reads, fd in writes) for fd in self.all if fd in reads or fd in writes]


class use_epoll:
    """At edges, so that what is reported once must be used up."""

    def __init__(self):
        self.poller = select.epoll()
        self.known = set()

    def set(self, file, writes):
        fd = file.fileno()
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        if fd not in self.known:
            self.poller.register(fd, events)
            self.known.add(fd)

    def remove(self, file):
        self.poller.unregister(file.fileno())
        self.known.remove(file.fileno())

    def wait(self):
        ends = select.EPOLLHUP | select.EPOLLERR
        return [(fd, events & (select.EPOLLIN | ends), events & select.EPOLLOUT) for fd, events in self.poller.poll()]


def poller(kind):
    def serve(listener):
        listener.setblocking(False)
        waiter = kind()
        waiter.set(listener, False)
        connections, ended = {}, 0
        while ended < CONNECTIONS:
            for fd, reads, _ in waiter.wait():
                if fd == listener.fileno():
                    while True:
                        try:
                            connection, _ = listener.accept()
                        except BlockingIOError:
                            break
                        connection.setblocking(False)
                        connections[connection.fileno()] = (connection, bytearray())
                        waiter.set(connection, False)
                    continue
                connection, left = connections[fd]
                is_ended = False
                try:
                    while reads:
                        data = connection.recv(10_000)
                        if not data:
                            is_ended = True
                            break
                        left += data
                except BlockingIOError:
                    pass
                try:
                    while left:
                        del left[:connection.send(left)]
                except BlockingIOError:
                    pass
                if is_ended:
                    assert not left
                    waiter.remove(connection)
                    connection.close()
                    del connections[fd]
                    ended += 1
                else:
                    waiter.set(connection, bool(left))

    return serve


def client(host, port):
    """Sends in parts and waits for all to be back, over several connections at once."""

    def run(seed):
        data = random.Random(seed).randbytes(BYTES)
        connection = socket.create_connection((host, port), timeout=20)
        sender = threading.Thread(target=connection.sendall, args=[data])
        sender.start()
        back = bytearray()
        while len(back) < len(data):
            part = connection.recv(7_000)
            assert part, "it ends early"
            back += part
        sender.join()
        assert back == data
        connection.shutdown(socket.SHUT_WR)
        assert not connection.recv(1), "the end of the stream"
        connection.close()
        done.append(seed)

    done = []
    all = [threading.Thread(target=run, args=[seed]) for seed in range(CONNECTIONS)]
    for thread in all:
        thread.start()
    for thread in all:
        thread.join()
    assert len(done) == CONNECTIONS, done
    print("all is back")


main()
