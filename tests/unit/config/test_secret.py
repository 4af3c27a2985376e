import pytest

from tandem.config.secret import (
    MIN_SECRET_NBYTES,
    SECRET_VARIABLE,
    is_loopback,
    new_cluster_secret,
    read_cluster_secret,
    require_secret,
)
from tandem.errors import ConfigError

GOOD = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path):
    def write(text: str, mode: int = 0o600) -> str:
        path = tmp_path / "secret"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


def test_the_file_goes_before_the_variable_and_blanks_do_not_count(file, monkeypatch):
    assert read_cluster_secret(None) is None
    monkeypatch.setenv(SECRET_VARIABLE, "v" * 40)
    assert read_cluster_secret(None) == b"v" * 40
    assert read_cluster_secret(file(f"  {GOOD}\n")) == GOOD.encode()


@pytest.mark.parametrize("text", ["", "\n", "hunter2", " " * 99, "x" * (MIN_SECRET_NBYTES - 1)])
def test_empty_and_short_secrets_are_refused_without_being_shown(text, file, monkeypatch):
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as by_file:
        read_cluster_secret(file(text))
    monkeypatch.setenv(SECRET_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE} holds a secret of") as by_variable:
        read_cluster_secret(None)
    if text.strip():
        assert text not in str(by_file.value) + str(by_variable.value)


def test_a_file_that_is_missing_or_endless_is_refused():
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster_secret("nowhere")
    with pytest.raises(ConfigError, match="expected 32 to 4096"):
        read_cluster_secret("/dev/zero")


def test_a_file_that_others_can_read_is_warned_about(file, caplog):
    read_cluster_secret(file(GOOD))
    assert caplog.text == ""
    read_cluster_secret(file(GOOD, 0o644))
    assert "chmod 600" in caplog.text
    assert GOOD not in caplog.text


def test_new_secrets_are_long_enough_and_differ(file):
    first, second = new_cluster_secret(), new_cluster_secret()
    assert first != second
    assert read_cluster_secret(file(first)) == first.encode()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback_is_told_from_what_others_reach(host, expected):
    assert is_loopback(host) is expected
    require_secret(GOOD.encode(), "host", host)
    if expected:
        require_secret(None, "host", host)
    else:
        with pytest.raises(ConfigError, match=r"or use 127\.0\.0\.1"):
            require_secret(None, "host", host)
