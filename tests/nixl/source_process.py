"""A rank in a process of its own whose arena is open to peers, until it is killed.

Reads its settings as a line of JSON from stdin, writes one prompt's state if they name pages, and
answers with its RankInfo; then with the bytes of its arena for each line. Leaves when stdin ends.
"""

import base64
import json
import sys

import msgspec

from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.passive import PassiveRank
from tandem.transfer.plan import Placement
from tests.unit.transfer.memory import build_rank, hybrid


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    memory = build_rank(hybrid(), *(settings[name] for name in ("tp", "rank", "page_tokens")), 16)
    if settings["pages"] is not None:
        where = Placement(settings["pages"], settings["slot"])
        memory.write(settings["seed"], settings["num_tokens"], where)
    source = PassiveRank(NixlAgent(f"P{memory.spec.rank}"), memory.layout)
    print(base64.b64encode(msgspec.msgpack.encode(source.info)).decode(), flush=True)
    for _ in sys.stdin:
        print(base64.b64encode(memory.buffer.tobytes()).decode(), flush=True)


main()
