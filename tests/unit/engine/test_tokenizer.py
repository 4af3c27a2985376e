import subprocess
import sys
import threading
import time

import pytest

from tandem.engine.tokenizer import LONG_TEXT_CHARS, Tokenizer
from tandem.errors import ModelError, RequestError
from tests.unit.tokenizers import byte_fallback, byte_level


@pytest.mark.parametrize("text", ["hello wörld", "日本 😀", "a  b\n"])
def test_token_bytes_join_to_the_text(text):
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert joined.decode().removeprefix(" " if tokenizer is byte_fallback() else "") == text


def test_token_bytes_of_special_and_unknown_ids():
    assert byte_level().token_bytes(1) == b"</s>"
    assert byte_level().token_bytes(99_999) == b""
    assert byte_level().decode([99_999]) == ""


def test_files_rebuild_the_same_tokenizer(tmp_path):
    files = byte_level().files()
    assert "tokenizer.json" in files
    copy = Tokenizer.from_files(files)
    messages = [{"role": "user", "content": "hello"}]
    assert copy.encode("hello 日本") == byte_level().encode("hello 日本")
    assert copy.render_chat(messages) == "<user>hello<assistant>"
    assert copy.files() == files


def test_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_broken_chat_template_is_refused_at_once(tmp_path):
    for name, content in byte_level().files().items():
        (tmp_path / name).write_bytes(content)
    assert Tokenizer.load(tmp_path).has_chat_template
    template = "{% for message in messages %}\n{{ message.content }"
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match="no valid Jinja, line 2"):
        Tokenizer.load(tmp_path)


def test_chat_template_refusals_name_the_reason():
    with pytest.raises(RequestError, match="unknown role robot") as caught:
        byte_level().render_chat([{"role": "robot", "content": "x"}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="no chat template"):
        byte_fallback().render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="must not set 'tokenize'"):
        byte_level().render_chat([{"role": "user", "content": "x"}], {"tokenize": True})


def test_rendering_a_chat_loads_no_torch():
    code = (
        "import sys; from tests.unit.tokenizers import byte_level;"
        "t = byte_level(); t.render_chat([{'role': 'user', 'content': 'x'}]); t.files();"
        "import tandem.engine.outputs;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_long_text_is_encoded_while_other_threads_run():
    tokenizer = byte_level()
    text = "hello 日本 " * 60_000
    short, long = "hello 日本 " * 400, "hello 日本 " * 800  # on either side of the limit
    assert len(short) < LONG_TEXT_CHARS < len(long)
    assert tokenizer.encode(long)[:1000] == tokenizer.encode(short)[:1000]
    beats = 0
    seen: list[int] = []

    def encode() -> None:
        seen.append(beats)
        tokenizer.encode(text)
        seen.append(beats)

    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        beats += 1
    before, after = seen
    assert after - before > 10
