"""Whole models on a GPU give the CPU's greedy tokens, with and without overlapped steps."""

import json
import os
import subprocess
import sys

import pytest

from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu

# The device is that of the process: the CPU's tokens come from one that sees no GPU.
_RUN = """
import json, sys
from tandem.engine.llm import LLM
from tandem.scheduler.request import SamplingParams

def main():
    folder, ways = sys.argv[1], json.loads(sys.argv[2])
    prompts = [[3 + (7 * i + 11 * n) % 500 for i in range(n)] for n in (1, 40, 150, 7, 90, 16)]
    found = []
    for way in ways:
        stops = way.pop("stops", [()] * len(prompts))
        params = [
            SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=tuple(stop), **fields)
            for stop, fields in zip(stops, way.pop("params"))
        ]
        with LLM(folder, page_tokens=16, max_num_seqs=4, budget_tokens=64, **way) as llm:
            outputs = llm.generate(prompts, params)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    print(json.dumps(found))

main()
"""
GREEDY = [{"temperature": 0}] * 6
SAMPLED = [
    {"temperature": 0, "logprobs": 2},
    {"seed": 5, "top_p": 0.9},
    {"seed": 6, "top_k": 20, "frequency_penalty": 0.7},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"seed": 7, "logprobs": 1},
    {"temperature": 0, "min_tokens": 9},
]


def run(folder, ways, **environment):
    """Tokens of six answers, by way: settings of an engine, `params` and `stops` of each."""
    process = subprocess.run(
        [sys.executable, "-c", _RUN, str(folder), json.dumps(ways)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe", "bamba"])
def test_greedy_tokens_equal_those_of_the_cpu(name, tmp_path):
    folder = save_tiny(name, tmp_path)
    way = {"params": GREEDY}
    (expected,) = run(folder, [way], CUDA_VISIBLE_DEVICES="", TANDEM_NATIVE="0")
    assert run(folder, [way]) == [expected]
    assert all(len(tokens) == 24 for tokens in expected)


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe"])
def test_overlapped_steps_say_what_plain_ones_do(name, tmp_path):
    """Also where stop tokens end answers, and rows that were planned behind are thrown away."""
    folder = save_tiny(name, tmp_path)
    (free,) = run(folder, [{"overlap": "off", "params": SAMPLED}])
    stops = [[tokens[4 + index]] for index, tokens in enumerate(free)]
    ends = {"params": SAMPLED, "stops": stops}
    plain, overlapped, stopped, plainly_stopped = run(
        folder,
        [
            {"overlap": "on", "decode_graphs": "off", "params": SAMPLED},
            {"overlap": "on", "params": SAMPLED},
            {"overlap": "on", **ends},
            {"overlap": "off", **ends},
        ],
    )
    assert plain == overlapped == free
    assert stopped == plainly_stopped
    assert sum(map(len, stopped)) < sum(map(len, free)) - 30


@pytest.mark.multi_gpu
def test_ranks_on_two_devices_learn_pending_tokens(tmp_path):
    folder = save_tiny("nemotron_h_moe", tmp_path)
    plain, recorded, launched = run(
        folder,
        [
            {"tp": 2, "overlap": "off", "params": SAMPLED},
            {"tp": 2, "overlap": "on", "params": SAMPLED},
            {"tp": 2, "overlap": "on", "decode_graphs": "off", "params": SAMPLED},
        ],
    )
    assert recorded == launched == plain
