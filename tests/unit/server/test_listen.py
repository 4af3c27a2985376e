import socket

import pytest

from tandem.errors import ConfigError
from tandem.server.listen import bind


def test_port_in_use_is_named_with_the_way_out():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--port"):
            bind("127.0.0.1", port)


def test_accepted_sockets_send_small_events_at_once():
    with bind("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname(), timeout=20):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_number_that_is_no_port_is_refused(port):
    with pytest.raises(ConfigError, match=rf"port={port}; expected 1\.\.65535"):
        bind("127.0.0.1", port)


def test_host_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("192.0.2.1", 0)
