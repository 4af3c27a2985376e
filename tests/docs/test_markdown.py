from tests.docs.markdown import ROOT, anchors, blocks, commands, inline_code, links, prose
from tests.docs.test_references import command_of, options

PAGE = """# A page: with `code`

See [docs](docs/api.md#fields), `--flag` and `[no](link)`.

```bash
tandem plan MODEL --tp 2 \\
  --rank 1   # --comment
tandem serve MODEL --port 8011 & pid=$!
```

```text
its output
```
Prose.
```text
a picture
```
````console
```
tandem plan
```
````
"""


def write(tmp_path, text=PAGE):
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def test_blocks_have_their_kind_their_line_and_the_output_that_follows(tmp_path):
    found = blocks(write(tmp_path))
    assert [block.info for block in found] == ["bash", "text", "text", "console"]
    assert [block.line for block in found] == [6, 12, 16, 19]
    assert found[0].output == "its output\n"
    assert [block.output for block in found[1:]] == [None] * 3
    assert found[3].text == "```\ntandem plan\n```\n"


def test_prose_keeps_its_lines(tmp_path):
    lines = prose(write(tmp_path)).split("\n")
    assert len(lines) == len(PAGE.splitlines())
    assert lines[13] == "Prose."
    assert not any("tandem" in line for line in lines)


def test_links_code_and_headings(tmp_path):
    path = write(tmp_path)
    assert links(path) == ["docs/api.md#fields"]
    assert inline_code(path) == ["code", "--flag", "[no](link)"]
    assert anchors(path) == {"a-page-with-code"}


def test_commands_end_where_the_shell_ends_them(tmp_path):
    bash = blocks(write(tmp_path))[0].text
    assert list(commands(bash)) == [
        ["plan", "MODEL", "--tp", "2", "--rank", "1"],
        ["serve", "MODEL", "--port", "8011"],
    ]
    assert list(commands("python -m tandem.cli plan; ./tandem x; tandem_x y")) == []


def test_flags_are_looked_up_in_the_command_that_they_are_given_to():
    known = options()
    assert command_of(["bench", "offline", "--steps", "4"], known) == "bench offline"
    assert command_of(["serve", "MODEL"], known) == "serve"
    assert command_of(["of", "two", "engines"], known) is None
    assert "--peer-tp" in known["plan"]
    assert "--peer-tp" not in known["serve"]


def test_the_pages_of_the_project_are_found():
    assert (ROOT / "pyproject.toml").is_file()
    assert any(block.info == "bash" for block in blocks(ROOT / "README.md"))
