"""A source rank in a process of its own: writes one prompt's state and serves reads until killed.

Reads its settings as a line of JSON from stdin, answers with its RankInfo, and leaves when stdin
ends.
"""

import base64
import json
import sys

import msgspec

from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.plan import Placement
from tandem.transfer.source import RankSource
from tests.unit.transfer.memory import build_rank, hybrid


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    memory = build_rank(hybrid(), *(settings[name] for name in ("tp", "rank", "page_tokens")), 16)
    where = Placement(settings["pages"], settings["slot"])
    memory.write(settings["seed"], settings["num_tokens"], where)
    source = RankSource(NixlAgent(f"P{memory.spec.rank}"), memory.layout)
    answer = base64.b64encode(msgspec.msgpack.encode(source.info)).decode()
    print(answer, flush=True)
    sys.stdin.read()


main()
