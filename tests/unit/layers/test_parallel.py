import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ShardingError
from tandem.layers.parallel import SingleRank, shard

RANK = """
import sys
import torch
import torch.distributed as dist
from tandem.layers.parallel import ProcessGroup

rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
tp = ProcessGroup()
assert (tp.rank, tp.size) == (rank, 2)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    mine = torch.arange(6, dtype=dtype).view(2, 3) + 10 * rank
    with torch.inference_mode():
        # A transposed view: what a collective gets need not be contiguous.
        summed = tp.all_reduce(mine.t()).t()
    assert summed.tolist() == [[10, 12, 14], [16, 18, 20]], summed
    mine = torch.arange(6, dtype=dtype).view(2, 3) + 10 * rank
    gathered = tp.all_gather(mine, dim=1)
    assert gathered.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]], gathered
dist.destroy_process_group()
"""


@given(units=st.integers(1, 64), size=st.integers(1, 16))
def test_shares_are_equal_disjoint_and_whole(units: int, size: int) -> None:
    ranks = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    if units % size:
        with pytest.raises(ShardingError, match=f"^layer 3 heads has {units} units.*tp={size}"):
            shard(units, ranks[0], "layer 3 heads")  # type: ignore[arg-type]
        return
    shares = [shard(units, rank, "layer 3 heads") for rank in ranks]  # type: ignore[arg-type]
    assert [unit for share in shares for unit in range(*share)] == [*range(units)]
    assert {stop - start for start, stop in shares} == {units // size}


def test_single_rank_collectives_return_their_argument() -> None:
    tensor = torch.ones(2, 3)
    assert SingleRank().all_reduce(tensor) is tensor
    assert SingleRank().all_gather(tensor, dim=1) is tensor


def test_collectives_between_processes(tmp_path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors.decode()
