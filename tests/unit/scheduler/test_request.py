"""What a request is checked for."""

import pytest

from tandem.scheduler.request import outside_vocabulary


@pytest.mark.parametrize(
    ("token_ids", "wrong"), [([], None), ([0, 9], None), ([3, 10, 1], 10), ([3, -1, 12], -1)]
)
def test_an_id_outside_the_vocabulary_is_named(token_ids: list[int], wrong: int | None) -> None:
    assert outside_vocabulary(token_ids, 10) == wrong
