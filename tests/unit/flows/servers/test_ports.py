"""Ports of local servers: nobody else gets one between its choice and the moment the server listens."""

from contextlib import ExitStack

from flows.servers.ports import free_port


def test_a_port_on_which_another_home_starts_a_server_is_left_to_it():
    with ExitStack() as one, ExitStack() as other:
        port = free_port(one)
        assert free_port(other, port) != port
    with ExitStack() as later:
        assert free_port(later, port) == port
