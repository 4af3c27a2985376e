"""The passive side of one rank: an arena that peers read (prefill, pull) or write (decode, push).

It owns no thread: the agent's progress thread serves peers while the rank computes.
"""

from tandem.transfer.agent import TransferAgent
from tandem.transfer.identity import current_process
from tandem.transfer.layout import RankInfo, RankLayout, check_layout


class PassiveRank:
    """Registers the arena and says what peers must know (`info`).

    The arena must outlive this and every peer that may still reach into it: it is never resized,
    unmapped or freed before the process ends.
    """

    def __init__(self, agent: TransferAgent, layout: RankLayout) -> None:
        check_layout(layout, "this engine")
        self._agent = agent
        agent.register(
            layout.base_address, layout.geometry.arena_nbytes, layout.memory, layout.device_id
        )
        self.info = RankInfo(
            rank=layout.spec.rank,
            agent_name=agent.name,
            metadata=agent.metadata(),
            layout=layout,
            process=current_process(),
        )

    def close(self) -> None:
        self._agent.close()
