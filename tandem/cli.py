"""The command line. Commands parse flags and hand over; nothing here imports torch."""

import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tandem import log as tandem_log
from tandem.config.args import build_config, flag_parameters
from tandem.config.engine import EngineConfig
from tandem.errors import ConfigError, TandemError

app = typer.Typer(
    name="tandem",
    help="Serve models that mix recurrent layers with attention, prefill and decode apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure speed; every figure stands beside its limit.")
app.add_typer(bench_app, name="bench", no_args_is_help=True)

ModelArgument = Annotated[str, typer.Argument(help="local HF folder", show_default=False)]
Host = Annotated[str, typer.Option(help="address to listen on")]
Port = Annotated[int, typer.Option(help="port to listen on; 0: any free one")]


def _checked_level(level: str | None, source: str = "log_level") -> str | None:
    if level and level.upper() not in tandem_log.LEVELS:
        raise ConfigError(f"{source}={level!r}; expected one of {', '.join(tandem_log.LEVELS)}")
    return level


LogLevel = Annotated[
    str | None,
    typer.Option(
        help="DEBUG, INFO, WARNING or ERROR", callback=lambda level: _checked_level(level)
    ),
]


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, besides its own options, one flag per engine setting (config/args.py)."""
    own = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    names = {parameter.name for parameter in own}
    parameters = own + [item for item in flag_parameters() if item.name not in names]

    def wrapped(**values: Any) -> None:
        command(**values)

    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {item.name: item.annotation for item in parameters}
    return wrapped


@app.command()
@_with_settings
def serve(
    model: ModelArgument,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    prefill: Annotated[int, typer.Option(help="prefill engines to start here")] = 0,
    decode: Annotated[int, typer.Option(help="decode engines to start here")] = 0,
    prefill_tp: Annotated[int, typer.Option(help="tp of each prefill engine")] = 1,
    decode_tp: Annotated[int, typer.Option(help="tp of each decode engine")] = 1,
    prefill_page_tokens: Annotated[
        int | None, typer.Option(help="page_tokens of prefill engines; default: --page-tokens")
    ] = None,
    log_level: LogLevel = None,
    **settings: Any,
) -> None:
    """Serve a model: one engine, a prefill or decode engine (--role), or both with a router."""
    config = build_config(model, settings)
    if not prefill and not decode:
        for name, value, default in (
            ("prefill_tp", prefill_tp, 1),
            ("decode_tp", decode_tp, 1),
            ("prefill_page_tokens", prefill_page_tokens, None),
        ):
            if value != default:
                raise ConfigError(
                    f"{name}={value} describes a pair; give --prefill and --decode too, or for one "
                    "engine --tp and --page-tokens"
                )
    if prefill or decode:
        from tandem.launch.pair import serve_pair

        serve_pair(
            config,
            host=host,
            port=port,
            num_prefill=prefill,
            num_decode=decode,
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            prefill_page_tokens=prefill_page_tokens,
            log_level=log_level,
        )
    else:
        from tandem.launch.engine_server import serve_engine

        serve_engine(config, host=host, port=port, log_level=log_level)


@app.command()
def route(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill engine; repeatable")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode engine; repeatable")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    cluster_secret_file: Annotated[
        str | None,
        typer.Option(help="file with the engines' secret; default: TANDEM_CLUSTER_SECRET"),
    ] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, help="how long running answers may last once it is stopped")
    ] = 30.0,
    log_level: LogLevel = None,
) -> None:
    """Route requests to prefill and decode engines that were started by hand."""
    from tandem.launch.router_server import serve_router

    serve_router(
        prefill,
        decode,
        host=host,
        port=port,
        cluster_secret_file=cluster_secret_file,
        drain_s=drain_s,
        log_level=log_level,
    )


@app.command()
def plan(
    model: ModelArgument,
    tp: Annotated[int, typer.Option(help="tensor-parallel size")] = 1,
    rank: Annotated[int, typer.Option(help="the rank to show")] = 0,
    page_tokens: Annotated[int, typer.Option(help="tokens of one page")] = 16,
    peer_tp: Annotated[
        int | None, typer.Option(help="tp of the engine to read from; shows what would move")
    ] = None,
    peer_page_tokens: Annotated[
        int | None, typer.Option(help="page_tokens of that engine; default: the same")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="weights and K/V")] = None,
    state_dtype: Annotated[str | None, typer.Option(help="recurrent state at rest")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Show how memory is laid out and what a transfer would move, from config.json alone."""
    from tandem.models.registry import load_model_config
    from tandem.transfer.memory_plan import build_plan, render_plan

    config = load_model_config(model, dtype=dtype, state_dtype=state_dtype)
    result = build_plan(
        config,
        tp=tp,
        rank=rank,
        page_tokens=page_tokens,
        peer_tp=peer_tp,
        peer_page_tokens=peer_page_tokens,
    )
    typer.echo(json.dumps(result, indent=1) if as_json else render_plan(result))


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """List the models that can be served, what their layers keep, and what tests hold them to."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from tandem.models.table import family_rows

    rows = family_rows()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table(box=None)
    for name in ("model", "model_type", "state", "feed-forward", "equal to", "tp"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            row.title,
            ", ".join(row.model_types),
            ", ".join(row.mixers),
            ", ".join(row.feed_forwards) or "-",
            row.oracle,
            ", ".join(map(str, row.tested_tp)),
        )
    Console().print(table)


@app.command()
def demo(
    prompt: Annotated[str | None, typer.Option(help="what to ask")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="leave it running")] = False,
    port: Port = 0,
) -> None:
    """Serve the model that ships with Tandem, prefill and decode apart, and ask it something."""
    from tandem.launch.demo import run_demo

    run_demo(prompt=prompt, keep=keep, port=port)


@bench_app.command("offline")
@_with_settings
def bench_offline(
    model: Annotated[
        str | None,
        typer.Argument(
            help="local HF folder, or a config that ships with Tandem (mamba2-220m, "
            "nemotron-3-nano-30b, nemotron-h-8b) with random weights; default: mamba2-220m"
        ),
    ] = None,
    prefill_tokens: Annotated[
        list[str] | None, typer.Option(help="prompts, as 512, or 16x8192 for 16 at once; or none")
    ] = None,
    batches: Annotated[list[int] | None, typer.Option(help="decode batches")] = None,
    decode_prompt: Annotated[
        int | None, typer.Option(help="prompt tokens before decode is timed")
    ] = None,
    distinct_prompts: Annotated[
        int | None,
        typer.Option(help="prompts that a decode batch's rows share; default: each its own"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="decode steps timed at each batch")] = None,
    mixed: Annotated[
        str | None,
        typer.Option(
            help="requests x tokens in x out, as 512x1024x256, or with most at once behind; or none"
        ),
    ] = None,
    profile: Annotated[
        list[int] | None, typer.Option(help="decode batches whose kernels are listed")
    ] = None,
    out: Annotated[str | None, typer.Option(help="file for the result so far, as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    log_level: LogLevel = "WARNING",
    **settings: Any,
) -> None:
    """What one engine does without HTTP, beside the machine's limits. Defaults fit the machine."""
    _require_writable(out=out)
    _require_counts(
        steps=[steps] if steps is not None else None,
        decode_prompt=[decode_prompt] if decode_prompt is not None else None,
        batches=batches,
        distinct_prompts=[distinct_prompts] if distinct_prompts is not None else None,
    )
    for text in prefill_tokens or ():
        if text.startswith("-"):
            _require_counts(prefill_tokens=[-1])
    from pathlib import Path

    import tandem.bench.offline as offline

    config = _bench_config(model, settings)
    cases = offline.default_cases(
        offline.has_gpu(),
        prompts=prefill_tokens,
        batches=batches,
        mixed=mixed,
        decode_prompt=decode_prompt,
        num_steps=steps,
        budget_tokens=config.scheduler.budget_tokens,
        profiled=profile,
        num_distinct=distinct_prompts,
    )
    tandem_log.configure(log_level)

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            Path(out).write_text(json.dumps(result, indent=1))

    _show_bench(offline.run_offline(config, cases, save), as_json)


@bench_app.command("pair")
@_with_settings
def bench_pair(
    model: Annotated[
        str | None, typer.Argument(help="local HF folder; default: 221.6M Mamba-2 hybrid, random")
    ] = None,
    prefill_tokens: Annotated[int, typer.Option(help="prompt length")] = 512,
    batches: Annotated[list[int] | None, typer.Option(help="decode batches")] = None,
    steps: Annotated[int, typer.Option(help="decode steps timed at each batch")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    log_level: LogLevel = "WARNING",
    **settings: Any,
) -> None:
    """Rates of a prefill and a decode engine on this machine, one thread each by default."""
    from tandem.bench.pair import run_pair

    _require_counts(steps=[steps], batches=batches, prefill_tokens=[prefill_tokens])
    tandem_log.configure(log_level)
    result = run_pair(
        _bench_config(model, settings),
        prefill_tokens=prefill_tokens,
        batches=batches or [1, 8, 32],
        num_steps=steps,
    )
    _show_bench(result, as_json)


@bench_app.command("transfer")
@_with_settings
def bench_transfer(
    model: Annotated[
        str | None,
        typer.Argument(
            help="local HF folder; default: a small hybrid, and Nemotron-3-Nano's state"
        ),
    ] = None,
    prompts: Annotated[list[int] | None, typer.Option(help="prompt lengths")] = None,
    rounds: Annotated[int, typer.Option(help="prompts of each length and way of reading")] = 5,
    move_tokens: Annotated[
        int, typer.Option(help="tokens of the prompt whose state is moved between ranks")
    ] = 8192,
    out: Annotated[str | None, typer.Option(help="file for the result, as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    log_level: LogLevel = "WARNING",
    **settings: Any,
) -> None:
    """Time to the second token of a pair, read after the prefill and streamed; speed of moves."""
    from pathlib import Path

    from rich.console import Console

    from tandem.bench.transfer import render, run_transfer
    from tandem.models.registry import load_model_config

    _require_writable(out=out)
    _require_counts(prompts=prompts, rounds=[rounds], move_tokens=[move_tokens])
    tandem_log.configure(log_level)
    config = _bench_config(model or "hybrid-long", settings)
    shapes = _bench_config(model or "nemotron-3-nano-30b", settings)
    result = run_transfer(
        config,
        load_model_config(shapes.model),
        prompts=prompts or [1024, 8192, 32768],
        num_rounds=rounds,
        move_tokens=move_tokens,
    )
    if out is not None:
        Path(out).write_text(json.dumps(result, indent=1))
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        render(result, Console())


@bench_app.command("faults")
def bench_faults(
    model: Annotated[
        str | None, typer.Argument(help="local HF folder; default: the model that ships")
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="one of them; repeatable; default: all")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(help="pull or push, of every engine; default: their own")
    ] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="write all figures there")
    ] = None,
    folder: Annotated[str | None, typer.Option(help="for the servers' logs")] = None,
    log_level: LogLevel = "INFO",
) -> None:
    """Break engines, router and network on purpose under load; exit status 1 if anything is lost
    that should not be."""
    from pathlib import Path

    from rich.console import Console

    from tandem.bench.faults.runner import choose, render, run_faults, summary

    _require_writable(json=json_path)
    scenarios = choose(scenario or [])
    tandem_log.configure(log_level)
    console = Console(highlight=False, soft_wrap=True)
    results: list[Any] = []

    def tell(result: Any) -> None:
        results.append(result)
        render([result], console)
        if json_path is not None:  # each time: a run takes long, and may be ended
            Path(json_path).write_text(json.dumps(summary(results), indent=1) + "\n")

    run_faults(
        model,
        scenarios,
        flags=("--transfer", transfer) if transfer else (),
        folder=Path(folder) if folder else None,
        tell=tell,
    )
    render(results, console)
    if any(result.problems for result in results):
        raise typer.Exit(1)


@bench_app.command("serve")
def bench_serve(
    urls: Annotated[
        list[str],
        typer.Argument(help="server, as http://127.0.0.1:8000; of several, workers take turns"),
    ],
    isl: Annotated[int, typer.Option(help="tokens of each prompt")] = 1024,
    osl: Annotated[int, typer.Option(help="tokens of each answer")] = 128,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="requests at once; repeatable; default: 1, 8, 32")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="requests of each concurrency; default: four a worker")
    ] = None,
    max_token_id: Annotated[
        int, typer.Option(help="prompts are random ids below this; the vocabulary must have them")
    ] = 30000,
    seed: Annotated[
        int, typer.Option(help="of the prompts; the same one twice asks for them again")
    ] = 0,
    model: Annotated[str | None, typer.Option(help="its name; default: the server's first")] = None,
    out: Annotated[str | None, typer.Option(help="file for the result so far, as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Rate and latency of a running server in a closed loop of streamed completions."""
    from pathlib import Path

    from rich.console import Console

    from tandem.bench.serve import Load, render_serve, run_serve

    levels = concurrency or [1, 8, 32]
    _require_writable(out=out)
    _require_counts(isl=[isl], osl=[osl], concurrency=levels)
    if requests is not None:
        _require_counts(requests=[requests])

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            Path(out).write_text(json.dumps(result, indent=1))

    result = run_serve(urls, Load(isl, osl, requests, max_token_id, model, seed), levels, save)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        render_serve(result, Console())


@bench_app.command("kernels")
def bench_kernels(
    only: Annotated[str, typer.Option(help="cases, or with --tune ops, whose name has this")] = "",
    tune: Annotated[
        bool, typer.Option("--tune", help="measure tile sizes for this GPU and write them")
    ] = False,
    out: Annotated[
        str | None, typer.Option(help="file for the result; with --tune by default the GPU's own")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    log_level: LogLevel = "INFO",
) -> None:
    """Each kernel on a GPU beside its floor; or the best tile sizes of this GPU."""
    from pathlib import Path

    from rich.console import Console

    from tandem.bench import kernels
    from tandem.bench import tune as tuning

    _require_writable(out=out)
    kernels.require_gpu()
    tandem_log.configure(log_level)
    path = None if out is None else Path(out)
    result = tuning.run_tune(only, path) if tune else kernels.run(only)
    if path is not None and not tune:
        path.write_text(json.dumps(result, indent=1))
    if as_json or tune:
        typer.echo(json.dumps(result, indent=1))
    else:
        kernels.render(result, Console(width=110))


def _require_counts(**named: list[int] | None) -> None:
    for name, counts in named.items():
        if any(count < 1 for count in counts or ()):
            raise ConfigError(f"{name}={min(counts or ())}; expected at least 1")


def _require_writable(**paths: str | None) -> None:
    """Before minutes of measurement, not behind them."""
    for name, path in paths.items():
        folder = os.path.dirname(os.path.abspath(path)) if path is not None else None
        if path is not None and (not os.path.isdir(str(folder)) or os.path.isdir(path)):
            raise ConfigError(f"{name}={path!r}; expected a file in a folder that exists")


def _bench_config(model: str | None, settings: dict[str, Any]) -> EngineConfig:
    """A model folder, or one of the configs that ship with Tandem, whose weights are random."""
    from importlib.resources import files

    shipped = files("tandem.bench") / "models" / (model or "mamba2-220m")
    if model is None or ("/" not in model and not os.path.exists(model) and shipped.is_dir()):
        model = str(shipped)
        settings = {**settings, "load_format": "random"}
    return build_config(model, settings)


def _show_bench(result: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console

    from tandem.bench.offline import render

    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        render(result, Console())


def main() -> None:
    """Entry point: errors of ours become one line on stderr and exit status 2."""
    try:
        _checked_level(os.environ.get("TANDEM_LOG"), "TANDEM_LOG")
        tandem_log.configure()
        app()
    except TandemError as error:
        typer.echo(f"tandem: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
