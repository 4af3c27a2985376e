"""The README's table of models is the one that `tandem models` prints."""

from tandem.models.table import markdown_table
from tests.docs.markdown import ROOT


def test_readme_has_the_generated_table() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"\n\n{markdown_table()}\n\n" in readme, (
        "README.md differs from tandem.models.table.markdown_table(); paste its output there"
    )
