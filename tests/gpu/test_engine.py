"""Whole models on a GPU give the CPU's greedy tokens."""

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
    prompts = [[3 + (7 * i + 11 * n) % 500 for i in range(n)] for n in (1, 40, 150)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(sys.argv[1], page_tokens=16, max_num_seqs=4, budget_tokens=64) as llm:
        outputs = llm.generate(prompts, params)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))

main()
"""


def greedy(folder, **environment):
    run = subprocess.run(
        [sys.executable, "-c", _RUN, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe", "bamba"])
def test_greedy_tokens_equal_those_of_the_cpu(name, tmp_path):
    folder = save_tiny(name, tmp_path)
    expected = greedy(folder, CUDA_VISIBLE_DEVICES="", TANDEM_NATIVE="0")
    assert greedy(folder) == expected
    assert all(len(tokens) == 24 for tokens in expected)
