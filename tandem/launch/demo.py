"""`tandem demo`: the model that ships, prefill and decode apart, one question over HTTP."""

import json
import subprocess
import sys
import time
from importlib.resources import files
from typing import Any

import httpx
from rich.console import Console

from tandem.errors import EngineDeadError
from tandem.server.listen import bind
from tandem.units import format_nbytes

DEFAULT_PROMPT = (
    "The code of Anna is 4821. Emma was not at home when the letter came, and it was left upon the "
    "table until the evening. The code of Edward is 7390. What is the code of Anna?"
)
_START_TIMEOUT_S = 180.0
_ANSWER_TIMEOUT_S = 60.0


def run_demo(*, prompt: str | None, keep: bool, port: int) -> None:
    """Start a pair in a child process, ask, show the answer and what moved, and stop (or keep it).

    Raises: EngineDeadError if the pair does not come up.
    """
    console = Console(highlight=False)
    model = str(files("tandem") / "demo_model")
    port = port or _free_port()
    command = [
        sys.executable,
        "-m",
        "tandem.cli",
        "serve",
        model,
        "--prefill",
        "1",
        "--decode",
        "1",
    ]
    command += ["--port", str(port), "--max-model-len", "1024", "--log-level", "WARNING"]
    console.print(f"$ tandem {' '.join(command[3:]).replace(model, 'tandem/demo_model')}")
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command)
    try:
        with console.status("starting a prefill engine, a decode engine and a router"):
            _wait_until_ready(url, process)
        _ask(console, url, prompt or DEFAULT_PROMPT)
        _show_next(console, url)
        if keep:
            console.print("\nrunning until interrupted (Ctrl-C)")
            process.wait()
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineDeadError("the pair did not start; its own message is above")
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    raise EngineDeadError(f"the pair was not ready within {_START_TIMEOUT_S:.0f} s")


def _body(prompt: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _ask(console: Console, url: str, prompt: str) -> None:
    console.print(f"\n[bold]You:[/bold] {prompt}\n[bold]Demo model:[/bold]", end="")
    start = time.perf_counter()
    first_s = 0.0
    usage: dict[str, Any] = {}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=_body(prompt), timeout=_ANSWER_TIMEOUT_S
    ) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise EngineDeadError(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                if text:
                    first_s = first_s or time.perf_counter() - start
                    console.print(text, end="", markup=False)
    seconds = time.perf_counter() - start
    console.print(
        f"\n\n{usage.get('prompt_tokens', 0)} prompt tokens, {usage.get('completion_tokens', 0)} "
        f"answered; first text after {first_s * 1e3:.0f} ms, all after {seconds * 1e3:.0f} ms"
    )
    _show_transfer(console, httpx.get(f"{url}/debug/pools", timeout=5.0).json())


def _show_transfer(console: Console, stats: dict[str, Any]) -> None:
    moved = next((engine for engine in _engines(stats) if engine.get("transfer_num_done")), None)
    if moved is None:
        raise EngineDeadError("no state was transferred; see the engines' messages above")
    console.print(
        f"moved from prefill to decode over NIXL: {moved['transfer_num_pages']:.0f} pages "
        f"({format_nbytes(int(moved['transfer_page_nbytes']))}) and 1 slot "
        f"({format_nbytes(int(moved['transfer_slot_nbytes']))}) in "
        f"{moved['transfer_num_descriptors']:.0f} descriptors, "
        f"{moved['transfer_read_seconds'] * 1e3:.1f} ms "
        f"({moved['transfer_seconds'] * 1e3:.0f} ms with handshake and lease)"
    )


def _engines(stats: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables of single engines inside a router's."""
    tables = [value for value in stats.values() if isinstance(value, dict)]
    return [inner for table in tables for inner in [table, *_engines(table)]]


def _show_next(console: Console, url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64}
    console.print(
        "\nthe next request, while it runs (tandem demo --keep):\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'",
        markup=False,
        soft_wrap=True,
    )
