"""Keys of servers: as text, in files, and never shown."""

from __future__ import annotations

import pytest

from timelyml.errors import ConfigError
from timelyml.exchange import AccessKey, CurveKeys, ServerKeys, tcp_endpoint
from timelyml.exchange.security import public_key_of


def test_a_key_comes_back_from_its_text_and_from_a_file(tmp_path):
    key = ServerKeys.generate().access
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(key.to_text() + "\n")
    assert AccessKey.of(key.to_text()) == AccessKey.of(path) == key


def test_a_server_keeps_its_keys_for_its_next_start(tmp_path):
    path = tmp_path / "keys"
    keys = ServerKeys.kept_in(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert ServerKeys.kept_in(path) == keys
    assert ServerKeys.kept_in(tmp_path / "others") != keys


@pytest.mark.parametrize("harm", [lambda t: t[:-3], lambda t: t.swapcase(), str.strip])
def test_a_key_that_was_not_copied_whole_is_refused_and_not_shown(harm):
    text = ServerKeys.generate().access.to_text()
    body = text.removeprefix("timelyml-key-")
    harmed = "timelyml-key-" + (harm(body) if harm is not str.strip else "none")
    with pytest.raises(ConfigError, match="a key is none") as caught:
        AccessKey.of(harmed)
    assert body[:12] not in str(caught.value)


def test_a_text_that_is_neither_key_nor_file_is_not_shown():
    with pytest.raises(
        ConfigError, match="FileNotFoundError for a text of 14"
    ) as caught:
        AccessKey.of("/no/such/thing")
    assert "/no/such" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_text(ServerKeys.generate().access.to_text())
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"for others to read.*0644.*expected 0600"):
        AccessKey.of(path)


def test_a_public_key_follows_from_the_secret_one():
    keys = CurveKeys.generate()
    assert public_key_of(keys.secret) == keys.public
    with pytest.raises(ConfigError, match="a secret key is none"):
        public_key_of(b"no key")


def test_keys_do_not_show_what_is_in_them():
    keys = ServerKeys.generate()
    shown = repr(keys) + repr(keys.access)
    for secret in (keys.curve.secret, keys.curve.public, keys.token):
        assert repr(secret)[2:-1] not in shown


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "tcp://localhost", "tcp://:1", "tcp://x:y", "tcp://x:0",
     "tcp://x:65535", "tcp://x:*"],
)  # fmt: skip
def test_an_address_without_two_ports_is_refused(address):
    with pytest.raises(ConfigError, match="an address cannot be used"):
        tcp_endpoint(address)
