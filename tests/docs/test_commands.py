"""What README and docs tell a reader to type is executed."""

import os
import subprocess

import pytest

from tests.docs.markdown import ROOT, Block, blocks, documents, is_executed
from tests.docs.shell import execute

# These run the tests or install: executed by whoever runs the tests, not by the tests.
OUTER = ("scripts/setup", "scripts/test", "scripts/check")
TIMEOUT_S = 240.0


def executed_blocks() -> list[object]:
    found = []
    for path in documents():
        for block in blocks(path):
            if not is_executed(block) or any(name in block.text for name in OUTER):
                continue
            is_quick = block.info == "bash" and "tandem" in block.text and not starts_engine(block)
            marks = [] if is_quick else [pytest.mark.slow]
            found.append(pytest.param(block, id=block.name, marks=marks))
    return found


def starts_engine(block: Block) -> bool:
    return any(word in block.text for word in ("tandem serve", "tandem bench", "demo\n", "LLM("))


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("block", executed_blocks())
def test_a_block_runs_and_prints_what_is_shown(block: Block) -> None:
    outcome = execute(block, TIMEOUT_S)
    assert outcome.status == 0, str(outcome)
    assert "Traceback" not in outcome.stderr, str(outcome)
    # curl ends with 0 when the server refused the request.
    assert '"error"' not in outcome.stdout, str(outcome)
    if "The code of Anna is 4821" in block.text:
        assert "4821" in outcome.stdout, str(outcome)
    if block.output is not None:
        assert block.output in outcome.stdout, str(outcome)
    if block.text.strip() == "scripts/demo":
        check_demo(outcome.stdout)


def check_demo(stdout: str) -> None:
    """It answers with the code it was told, says what moved, and how to go on."""
    _, _, answer = stdout.partition("Demo model:")
    answer, _, rest = answer.partition("\n\n")
    assert "4821" in answer
    assert "moved from prefill to decode over NIXL: " in rest
    assert " 1 slot (" in rest
    assert " descriptors, " in rest
    assert "/v1/chat/completions" in rest


def test_the_readme_shows_how_to_start_each_way_of_serving() -> None:
    texts = [block.text for block in blocks(ROOT / "README.md") if is_executed(block)]
    assert "scripts/demo\n" in texts
    for words in (
        "tandem serve ",
        "--prefill 1 --decode 1",
        "tandem plan ",
        "tandem bench offline",
    ):
        assert any(words in text for text in texts), words
    assert any("from tandem import LLM, SamplingParams" in text for text in texts)


@pytest.mark.parametrize("name", ["scripts/setup", "scripts/test", "scripts/demo", "scripts/check"])
def test_scripts_can_be_executed(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    # On a fresh machine each of them is the first command.
    assert name == "scripts/setup" or "\nscripts/setup\n" in text


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"scripts/check", "scripts/test"} <= set(lines)


def test_a_block_that_fails_or_leaves_a_process_is_noticed() -> None:
    """The tests above can fail."""

    def status(text: str) -> int | None:
        return execute(Block(ROOT / "README.md", 1, "bash", text), timeout_s=20).status

    assert status("false\ntrue\n") == 1
    assert status("echo $unset_name\n") != 0
    assert status("sleep 60 &\n") == -1
    assert status("true\n") == 0
