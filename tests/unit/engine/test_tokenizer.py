import subprocess
import sys
import threading
import time

import pytest

from tandem.engine.tokenizer import Tokenizer
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


def test_a_long_text_does_not_hold_up_decoding():
    tokenizer = byte_level()
    done = threading.Event()
    spent = 0.0

    def encode() -> None:
        nonlocal spent
        start = time.thread_time()
        tokenizer.encode("a " * 300_000)
        spent = time.thread_time() - start
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    longest = 0.0
    while not done.is_set():
        start = time.perf_counter()
        tokenizer.decode([5, 6, 7])
        longest = max(longest, time.perf_counter() - start)
        time.sleep(0.001)
    thread.join()
    # Decoding with the object that encodes waits for the whole of it.
    assert longest < spent / 2, (longest, spent)
