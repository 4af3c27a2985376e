"""CPU time that one token costs between a core and a client, process by process.

    python -m tests.bench.frontend [--concurrency 128] [--step-ms 12.5] [--pair] [--profile FOLDER]

One HTTP server (with --pair a prefill server, a decode server and a router) over cores that make
tokens at a rate (fake_core.py), driven by `tandem bench serve`. CPU time, unlike wall time, means
the same beside other processes.
"""

import argparse
import cProfile
import json
import multiprocessing
import os
import socket
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tandem import log as tandem_log
from tandem.bench.plain_tokenizer import write_plain_tokenizer
from tandem.bench.serve import Load, run_serve
from tandem.config.engine import EngineConfig, TransferOptions
from tandem.engine import child, client
from tandem.launch import engine_server, router_server
from tandem.launch.signals import Stop, run_until_signalled
from tandem.server.listen import bind


def _serve(
    listener: socket.socket, model: str, role: str, step_s: float, urls: list[str], profile: str
) -> None:
    """A process: an HTTP server over a fake core, or a router."""
    tandem_log.configure("WARNING")
    spawn = child.spawn
    client.spawn = lambda module, settings: spawn("tests.bench.fake_core", settings)
    stop = Stop()
    if role == "router":
        work = router_server.run_router(urls[:1], urls[1:], listener, None, stop, 5.0)
    else:
        options = TransferOptions(role=role, quarantine_s=1e3 * step_s)
        config = EngineConfig(model, transfer=options)
        work = engine_server.run(config, listener, "WARNING", stop)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    run_until_signalled(work, stop)
    if profile:
        profiler.disable()
        profiler.dump_stats(f"{profile}/{role}.prof")


def _cpu_s(pid: int) -> tuple[float, float]:
    """In the process itself, and in the kernel for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as reply:
                if json.load(reply)["status"] == "ready":
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=12.5)
    parser.add_argument("--osl", type=int, default=256)
    parser.add_argument("--isl", type=int, default=64)
    parser.add_argument("--pair", action="store_true")
    parser.add_argument("--profile", default="", help="folder for cProfile's files")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        config = {"vocab_size": 131072, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        write_plain_tokenizer(Path(folder), config)
        roles = ["prefill", "decode", "router"] if arguments.pair else ["colocated"]
        listeners = [bind("127.0.0.1", 0) for _ in roles]
        urls = [f"http://127.0.0.1:{item.getsockname()[1]}" for item in listeners]
        processes = []
        for role, listener in zip(roles, listeners, strict=True):
            step_s = 0.0005 if role == "prefill" else arguments.step_ms / 1e3
            work = (listener, folder, role, step_s, urls[:2], arguments.profile)
            processes.append(context.Process(target=_serve, args=work, name=role))
            processes[-1].start()
        _wait_ready(urls[-1])
        load = Load(arguments.isl, arguments.osl, 2 * arguments.concurrency, 30000)
        pids = {"client": os.getpid(), **{item.name: item.pid for item in processes}}
        before = {name: _cpu_s(pid) for name, pid in pids.items()}
        result = run_serve([urls[-1]], load, [arguments.concurrency])
        row = result["rows"][0]
        num_tokens = row["num_requests"] * arguments.osl
        out: dict[str, Any] = {"tok/s": round(row["output_tokens_per_s"])}
        for name, pid in pids.items():
            spent = zip(_cpu_s(pid), before[name], strict=True)
            out[name] = [round(1e6 * (now - then) / num_tokens, 1) for now, then in spent]
        out["tpot"] = {key: round(value, 2) for key, value in row["tpot_ms"].items()}
        out["ttft"] = {key: round(value, 1) for key, value in row["ttft_ms"].items()}
        print(json.dumps(out))
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.join(10)


if __name__ == "__main__":
    main()
