"""Where the engines of a pair run."""

import pytest

from tandem.launch.pair import place_engines, visible_gpus


def test_each_engine_has_gpus_of_its_own_and_sees_the_others() -> None:
    places = place_engines([2, 1], ["0", "1", "2", "3"])
    assert places == [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "2,0,1,3"}]
    assert place_engines([1, 1], ["GPU-b", "GPU-a"]) == [
        {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"},
        {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
    ]


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_without_enough_gpus_nothing_is_chosen(gpus: list[str]) -> None:
    assert place_engines([1, 1], gpus) == [{}, {}]


def test_gpus_are_those_that_were_chosen_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert visible_gpus() == ["3", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
