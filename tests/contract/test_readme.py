"""What the README lists is what there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def listed(text: str) -> set[str]:
    """The paths that the README's tree names."""
    paths, folders = set(), [""]
    for line in text.splitlines():
        entry = re.match(r" {4}( *)([^\s,]+(?:, [^\s,]+)*)", line)
        if entry:
            depth = len(entry[1]) // 2
            names = [folders[depth] + name for name in entry[2].split(", ")]
            paths.update(names)
            folders[depth + 1 :] = [names[-1]]
    return paths


def test_every_path_of_the_tree_exists() -> None:
    """The commented tree names no file or folder that is not there."""
    tree = README.split("<!-- tree:begin -->")[1].split("<!-- tree:end -->")[0]
    paths = listed(tree)
    assert "app/pipeline.py" in paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_module_of_the_top_level_is_in_the_tree() -> None:
    """A new module or package of app/ gets its line in the tree."""
    tree = README.split("<!-- tree:begin -->")[1].split("<!-- tree:end -->")[0]
    there = {
        f"app/{path.name}{'/' * path.is_dir()}"
        for path in (ROOT / "app").iterdir()
        if not path.name.startswith("__") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert there - listed(tree) == set()


def test_links_lead_somewhere() -> None:
    """Every relative link of the README names a file."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
