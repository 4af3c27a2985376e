"""All source ranks of some engines in one process, with an agent each: they write the identities
of their elements and are open to peers until stdin ends.

Reads the names of cases as a line of JSON; answers with the RankInfos of each.
"""

import base64
import json
import sys

import msgspec

from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.passive import PassiveRank
from tests.nixl.identity_cases import CASES
from tests.nixl.identity_memory import IdentityMemory, numbers


def main() -> None:
    kept = []
    for name in json.loads(sys.stdin.readline()):
        case = CASES[name]
        ranks = [IdentityMemory(case.src, rank) for rank in range(case.src.tp)]
        for number, _, rank, address, nbytes, _ in numbers(case.src, case.lengths):
            ranks[rank].write(address, nbytes, number)
        sources = [
            PassiveRank(NixlAgent(f"P{rank}"), memory.layout) for rank, memory in enumerate(ranks)
        ]
        kept.append((ranks, sources))
        infos = [source.info for source in sources]
        print(base64.b64encode(msgspec.msgpack.encode(infos)).decode(), flush=True)
    sys.stdin.read()


main()
