from __future__ import annotations

import pytest

from timelyml.errors import ConfigError
from timelyml.exchange import CurveKeys, ZmqTransport
from timelyml.exchange.security import check_tcp_bind, checked_ipc_directory

from .samples import TOKEN, codec, private


def open_and_close(bind, **options):
    ZmqTransport(0, codec=codec(), **{"token": TOKEN, "bind": bind, **options}).close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777])
def test_a_socket_directory_that_others_may_enter_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"not private.* mode {mode:04o}"):
        open_and_close(f"ipc://{tmp_path}")


def test_a_socket_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    private(tmp_path)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="expected a directory of user 12345"):
        checked_ipc_directory(f"ipc://{tmp_path}")


def test_a_link_to_a_socket_directory_is_refused(tmp_path):
    private(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not private"):
        open_and_close(f"ipc://{link}")


def test_a_socket_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        open_and_close(f"ipc://{tmp_path}/nowhere")


def test_a_socket_path_that_is_too_long_is_refused(tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="expected at most 107 bytes"):
        open_and_close(f"ipc://{deep}")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.168.0.1", "eth0", "[::]"])
def test_a_tcp_address_on_the_network_needs_keys(host):
    with pytest.raises(ConfigError, match="open to the network without keys"):
        open_and_close(f"tcp://{host}:*")
    check_tcp_bind(f"tcp://{host}:*", CurveKeys.generate())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_a_tcp_address_on_loopback_makes_its_own_keys(host):
    check_tcp_bind(f"tcp://{host}:*", None)


def test_an_address_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="expected ipc://<directory> or tcp"):
        open_and_close("inproc://x")


def test_an_address_in_use_is_refused(tmp_path):
    taken = ZmqTransport(0, codec=codec(), token=TOKEN, bind="tcp://127.0.0.1:*")
    try:
        with pytest.raises(ConfigError, match=r"cannot bind.*in use"):
            open_and_close(taken.endpoint.control)
    finally:
        taken.close()


def test_a_token_of_another_length_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no valid token; got 3 bytes"):
        open_and_close(private(tmp_path), token=b"abc")


def test_a_secret_key_is_not_shown():
    keys = CurveKeys.generate()
    assert keys.secret.decode() not in repr(keys)
    assert CurveKeys.generate() != keys
