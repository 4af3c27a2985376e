"""The command line: `tandem plan` on a config alone, flags, refusals and exit statuses."""

import json
import subprocess
import sys

import click
import pytest
import typer

from tandem import cli
from tandem.config.args import flag_name, setting_names
from tandem.models.registry import FAMILIES

# Nemotron-3-Nano-30B-A3B: 52 layers, of which 23 Mamba-2, 6 attention and 23 experts.
NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
SIZES = (
    "page_nbytes",
    "slot_nbytes",
    "pages_per_slab",
    "slots_per_slab",
    "slab_nbytes",
    "padding_nbytes",
)
COMPONENT_KEYS = {"part", "layer", "name", "offset", "unit_nbytes", "units"}
SEGMENT_KEYS = {
    "part",
    "layer",
    "component",
    "src_rank",
    "src_offset",
    "dst_offset",
    "nbytes",
}


@pytest.fixture
def nano(tmp_path):
    """A folder that holds a config.json and nothing else."""
    folder = tmp_path / "nano"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NANO))
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*words)` -> (exit status, stdout, stderr) of `tandem` with these words, in process."""
    # Logging is configured once a process, for the stderr of that moment, which is this test's.
    monkeypatch.setattr(cli.tandem_log, "configure", lambda *args: None)

    def invoke(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return invoke


@pytest.fixture
def plan(run, nano):
    """`plan(*flags)`: the plan of the Nano model as `--json` prints it."""

    def read(*flags) -> dict:
        status, out, err = run("plan", nano, "--page-tokens", "64", *flags, "--json")
        assert status == 0, err
        return json.loads(out)

    return read


def of_part(items, part):
    return [item for item in items if item["part"] == part]


def nbytes(component):
    return component["unit_nbytes"] * len(component["units"])


@pytest.mark.parametrize(
    ("tp", "sizes", "layer"),
    [
        (1, (393_216, 49_082_368, 125, 1, 49_152_000, 69_632), (24_576, 6_144, 2_097_152)),
        (2, (196_608, 24_541_184, 125, 1, 24_576_000, 34_816), (12_288, 3_072, 1_048_576)),
        (4, (196_608, 12_270_592, 63, 1, 12_386_304, 115_712), (6_144, 1_536, 524_288)),
    ],
)
def test_plan_gives_the_sizes_of_nemotron_3_nano(plan, tp, sizes, layer):
    for rank in range(tp):
        found = plan("--tp", tp, "--rank", rank)
        assert tuple(found[name] for name in SIZES) == sizes
        x, bc, ssm = layer
        first = {item["name"]: nbytes(item) for item in found["components"] if item["layer"] == 0}
        assert first == {"conv.x": x, "conv.B": bc, "conv.C": bc, "ssm": ssm}


def test_plan_lists_every_component_with_its_place_and_its_units(plan):
    found = plan("--tp", "4", "--rank", "3")
    assert "segments" not in found
    assert all(set(item) == COMPONENT_KEYS for item in found["components"])
    pattern = NANO["hybrid_override_pattern"]
    mamba = [layer for layer, letter in enumerate(pattern) if letter == "M"]
    attention = [layer for layer, letter in enumerate(pattern) if letter == "*"]
    page = of_part(found["components"], "page")
    assert [(item["layer"], item["name"]) for item in page] == [(i, "kv") for i in attention]
    # 2 KV heads on 4 ranks: the last two hold head 1.
    assert {tuple(item["units"]) for item in page} == {(1,)}
    assert [item["offset"] for item in page] == [32_768 * i for i in range(6)]
    slot = of_part(found["components"], "slot")
    names = ["conv.x", "conv.B", "conv.C", "ssm"]
    assert [(i["layer"], i["name"]) for i in slot] == [(i, name) for i in mamba for name in names]
    assert [item["units"] for item in slot[:4]] == [
        [*range(48, 64)],
        [6, 7],
        [6, 7],
        [*range(48, 64)],
    ]
    assert [item["offset"] for item in slot[:5]] == [0, 6_144, 7_680, 9_216, 533_504]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("peer_tp", [1, 2, 4, 8])
def test_plan_segments_fill_every_byte_of_every_component_once(plan, tp, peer_tp):
    found = plan("--tp", tp, "--rank", tp - 1, "--peer-tp", peer_tp)
    sources = [plan("--tp", peer_tp, "--rank", rank) for rank in range(peer_tp)]
    assert all(set(item) == SEGMENT_KEYS for item in found["segments"])
    for part in ("page", "slot"):
        pieces = of_part(found["segments"], part)
        components = of_part(found["components"], part)
        assert sum(item["nbytes"] for item in pieces) == found[f"{part}_nbytes"]
        covered = {(item["layer"], item["name"]): item["offset"] for item in components}
        for item in pieces:
            key = (item["layer"], item["component"])
            assert item["dst_offset"] == covered[key], "a gap, an overlap or another order"
            covered[key] += item["nbytes"]
            (source,) = [
                other
                for other in of_part(sources[item["src_rank"]]["components"], part)
                if (other["layer"], other["name"]) == key
            ]
            within = item["src_offset"] - source["offset"]
            assert within >= 0
            assert within + item["nbytes"] <= nbytes(source)
        for item in components:
            assert covered[item["layer"], item["name"]] == item["offset"] + nbytes(item)


def test_plan_with_unequal_pages_names_pages_of_both_sides(plan):
    found = plan("--peer-tp", "1", "--peer-page-tokens", "16")
    pieces = of_part(found["segments"], "page")
    assert {(item["src_page"], item["dst_page"]) for item in pieces} == {(i, 0) for i in range(4)}
    assert sum(item["nbytes"] for item in pieces) == found["page_nbytes"]


def test_plan_follows_dtypes(plan):
    half = plan("--dtype", "float32", "--state-dtype", "bfloat16")
    assert half["page_nbytes"] == 2 * 393_216
    assert half["slot_nbytes"] == 23 * (2 * (24_576 + 2 * 6_144) + 2_097_152 // 2)


def test_plan_as_text_is_a_table(run, nano):
    flags = ("--tp", "2", "--rank", "1", "--page-tokens", "64", "--peer-tp", "1")
    status, out, _ = run("plan", nano, *flags)
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "nano: rank 1 of tp 2, pages of 64 tokens"
    assert "slot_nbytes 24,541,184 23.4 MiB" in lines
    assert "padding_nbytes 34,816 34.0 KiB" in lines
    assert "part component layers which units unit bytes bytes a layer" in lines
    ssm = next(line for line in lines if line.startswith("slot ssm"))
    assert ssm.startswith("slot ssm 23 0 2 4 7 ")
    assert ssm.endswith(" 32-63 32,768 1,048,576")
    assert "slot conv.B 0 92 768 70,656" in lines
    assert max(map(len, out.splitlines())) < 160


@pytest.mark.parametrize("flags", [("--tp", "3"), ("--peer-tp", "3")])
def test_plan_refuses_a_tp_that_does_not_fit(run, nano, flags):
    status, out, err = run("plan", nano, *flags)
    assert (status, out) == (2, "")
    assert "conv.x has 64 units" in err
    assert "tp=3" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rank", "1"), "rank=1"),
        (("--tp", "0"), "tp=0"),
        (("--page-tokens", "12"), "page_tokens=12"),
        (("--peer-tp", "1", "--peer-page-tokens", "4"), "page_tokens=4"),
        (("--dtype", "int8"), "dtype='int8'"),
        (("--tp", "1000000000"), "tp=1000000000; expected at least 1, at most 1024"),
        (("--peer-tp", "100000000"), "tp=100000000; expected at least 1, at most 1024"),
        (("--page-tokens", "8000000000000"), "expected at most 65536"),
        (("--peer-page-tokens", "32"), "peer_page_tokens=32 describes a peer whose peer_tp"),
    ],
)
def test_plan_refuses_bad_values_in_one_line(run, nano, flags, message):
    status, out, err = run("plan", nano, *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": None}, "model_type=None"),
        ({"hybrid_override_pattern": "MXM"}, "hybrid_override_pattern has 'X'"),
    ],
)
def test_plan_refuses_an_unknown_architecture(run, tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps({**NANO, **change}))
    status, out, err = run("plan", str(tmp_path))
    assert (status, out) == (2, "")
    assert message in err
    assert str(tmp_path) in err
    assert "supported" in err


def test_plan_refuses_a_folder_without_config(run, tmp_path):
    status, _, err = run("plan", str(tmp_path))
    assert status == 2
    assert "config.json does not exist" in err


def test_plan_starts_without_torch(nano):
    code = (
        "import sys\n"
        "from tandem.cli import main\n"
        f"sys.argv = ['tandem', 'plan', {nano!r}, '--peer-tp', '2', '--json']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stopped:\n"
        "    assert not stopped.code\n"
        "heavy = {'torch', 'transformers', 'nixl_cu13', 'triton', 'fastapi'} & set(sys.modules)\n"
        "print('\\nloaded:', *sorted(heavy))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    out, _, loaded = process.stdout.rpartition("loaded:")
    assert json.loads(out)["peer_tp"] == 2
    assert loaded.split() == []


def test_a_refusal_is_one_line_on_stderr_and_status_2():
    process = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "plan", "no/such/folder"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (process.returncode, process.stdout) == (2, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("tandem: no/such/folder does not exist; expected ")


@pytest.mark.parametrize(
    "flags", [("--steps", "0"), ("--batches", "0"), ("--prefill-tokens", "-5")]
)
@pytest.mark.parametrize("what", ["offline", "pair"])
def test_bench_refuses_counts_below_one(run, nano, what, flags):
    status, _, err = run("bench", what, nano, *flags)
    assert status == 2
    assert "expected at least 1" in err


@pytest.mark.parametrize("what", ["offline", "transfer"])
def test_bench_refuses_a_file_that_it_could_not_write_before_it_measures(run, nano, tmp_path, what):
    path = tmp_path / "missing" / "out.json"
    status, out, err = run("bench", what, nano, "--out", str(path))
    assert (status, out) == (2, "")
    assert f"out={str(path)!r}; expected a file in a folder that exists" in err


def test_bench_refuses_to_profile_a_batch_that_it_does_not_measure(run, nano):
    status, _, err = run("bench", "offline", nano, "--batches", "2", "--profile", "3")
    assert status == 2
    assert "profile=3; expected one of the batches [2]" in err


@pytest.mark.parametrize("flag", ["--prompts", "--rounds", "--move-tokens"])
def test_bench_transfer_refuses_counts_below_one(run, nano, flag):
    status, _, err = run("bench", "transfer", nano, flag, "0")
    assert status == 2
    assert f"{flag[2:].replace('-', '_')}=0; expected at least 1" in err


@pytest.mark.parametrize(
    "url", ["", "nonsense", "ftp://a", "http://", "http://127.0.0.1:99999", "http://a:b"]
)
def test_route_refuses_what_is_no_address(run, url):
    status, _, err = run("route", "--prefill", url, "--decode", "http://127.0.0.1:1", "--port", "0")
    assert status == 2
    assert "is no address of an engine; expected http://HOST:PORT" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--role", "both"), "role='both'; expected colocated, prefill or decode"),
        (("--page-tokens", "12"), "page_tokens=12"),
        (("--lease-s", "1", "--deadline-s", "2"), "deadline_s=2.0"),
        (("--load-format", "dummy"), "load_format='dummy'"),
        (("--log-level", "LOUD"), "log_level='LOUD'; expected one of DEBUG, INFO"),
        (("--port", "99999"), "port=99999; expected 1..65535"),
        (("--side-channel-port", "99999"), "side_channel_port=99999; expected 1..65535"),
        (("--prefill-tp", "2"), "prefill_tp=2 describes a pair; give --prefill and --decode"),
        (("--prefill-page-tokens", "32"), "prefill_page_tokens=32 describes a pair"),
        (
            ("--prefill", "1", "--decode", "1", "--prefill-tp", "0", "--decode-tp", "0"),
            "prefill_tp=0; expected at least 1",
        ),
    ],
)
def test_serve_refuses_bad_settings_before_it_starts_anything(run, nano, flags, message):
    status, _, err = run("serve", nano, *flags)
    assert status == 2
    assert message in err


# --- flags ---


def commands(group: click.Group | None = None, path: str = "tandem") -> list:
    """(name, command) of every command, those of groups included."""
    group = group or typer.main.get_command(cli.app)
    found = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found += commands(command, f"{path} {name}")
        else:
            found.append((f"{path} {name}", command))
    return found


def test_the_commands_are_those_of_the_documentation():
    names = {name for name, _ in commands()}
    assert {f"tandem {name}" for name in ("serve", "route", "plan", "demo")} <= names
    assert "tandem bench offline" in names


def test_every_command_and_every_flag_has_a_help_text():
    for name, command in commands():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.opts}"


def test_a_flag_is_written_with_hyphens_and_means_one_thing():
    for name, command in commands():
        flags = [flag for item in command.params for flag in item.opts if flag.startswith("-")]
        assert len(flags) == len(set(flags)), name
        assert not any("_" in flag for flag in flags), name


@pytest.mark.parametrize("name", ["tandem serve", "tandem bench offline"])
def test_every_setting_of_an_engine_is_a_flag_with_its_default(name):
    from tandem.config.args import SECTIONS

    command = dict(commands())[name]
    options = {item.opts[0]: item for item in command.params}
    assert {flag_name(setting) for setting in setting_names()} <= set(options)
    for section in SECTIONS.values():
        for field, default in vars(section()).items():
            assert options[flag_name(field)].default == default, field


def test_without_a_command_the_help_is_shown(run):
    status, out, err = run()
    assert "plan" in out + err
    assert status in (0, 2)


def test_an_unknown_flag_is_named(run, nano):
    status, _, err = run("plan", nano, "--page-size", "64")
    assert status == 2
    assert "--page-size" in err


def test_models_lists_every_family_once(run):
    status, out, _ = run("models", "--json")
    rows = {row["title"]: row for row in json.loads(out)}
    assert status == 0
    assert rows["Falcon-H1"]["mixers"] == ["mamba2", "attention"]
    assert {name for row in rows.values() for name in row["model_types"]} == set(FAMILIES)
    status, out, _ = run("models")
    assert status == 0
    assert "Falcon-H1" in out
