"""A local server's port is reserved from the moment it is chosen until the server's first answer."""

import socket
import subprocess
import sys

import pytest

from flows.servers.programs import listener


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("shared", [[], [socket.SO_REUSEADDR], [socket.SO_REUSEADDR, socket.SO_REUSEPORT]])
def test_before_the_server_answers_nobody_else_gets_its_port(address, shared):
    with listener() as public, socket.socket() as stranger:
        for option in shared:
            stranger.setsockopt(socket.SOL_SOCKET, option, 1)
        with pytest.raises(OSError, match="in use"):
            stranger.bind((address, public.getsockname()[1]))


def test_who_asks_early_is_answered_by_the_server_that_inherits_the_socket():
    server = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).accept()[0].sendall(b'ours')"
    with listener() as public, socket.create_connection(public.getsockname()) as early:
        descriptor = public.fileno()
        with subprocess.Popen([sys.executable, "-c", server, str(descriptor)], pass_fds=(descriptor,)) as process:
            assert early.recv(4) == b"ours"
        assert process.returncode == 0


def test_a_port_on_which_another_home_starts_a_server_is_left_to_it():
    with listener() as one:
        port = one.getsockname()[1]
        with listener(port) as other:
            assert other.getsockname()[1] != port
    with listener(None, port) as later:
        assert later.getsockname()[1] == port


def test_a_port_that_another_has_bound_and_shares_is_ours_only_if_we_listen_first():
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", 0))
        port = stranger.getsockname()[1]
        with listener(port) as public:
            assert public.getsockname()[1] == port
            with pytest.raises(OSError, match="in use"):
                stranger.listen()
