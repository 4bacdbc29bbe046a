"""The project's own rows: sound files, frames that do not rule them, splits that keep neighbours together."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from app.safety.categories import CATEGORIES
from app.safety.text.normalize import normalize
from scripts.training.safety import balance, calibrate, rows
from scripts.training.safety.rows import BadRows, Row


@pytest.fixture(scope="module")
def own() -> list[Row]:
    """All of them."""
    return rows.own()


def test_there_are_as_many_as_were_asked_for(own: list[Row]):
    """20,000, of which 3,000 written one by one."""
    assert len(own) >= 20_000
    assert sum(row.source.startswith("written") for row in own) >= 3_000


def test_no_frame_has_more_than_twenty(own: list[Row]):
    """So that no sentence frame is what is learned."""
    frames = Counter(row.group for row in own if row.source.startswith("frames"))
    assert max(frames.values()) <= rows.PER_FRAME


def test_every_row_is_whole(own: list[Row]):
    """A text without open slots, a kind, and a category that exists."""
    for row in own:
        assert row.text.strip()
        assert row.kind in {"prompt", "output"}
        assert row.harmful == (row.category is not None)
        assert row.category is None or row.category in CATEGORIES
        assert row.near is None or row.near in CATEGORIES


def test_every_category_has_harmful_rows_and_look_alikes(own: list[Row]):
    """Both sides of each, so that the difference can be learned."""
    harmful = Counter(row.category for row in own if row.harmful)
    near = Counter(row.near for row in own if row.near)
    assert min(harmful[code] for code in CATEGORIES) >= 40
    assert min(near[code] for code in CATEGORIES) >= 40


def test_a_group_is_held_out_as_a_whole(own: list[Row]):
    """Neighbours of one file are all trained on or none is; frames always are, for their twins' sake."""
    sides: dict[str, set[bool]] = {}
    for row in own:
        sides.setdefault(row.group, set()).add(row.held_out)
    assert all(len(side) == 1 for side in sides.values())
    written = [row for row in own if row.source.startswith("written")]
    assert 0.05 < sum(row.held_out for row in written) / len(written) < 0.12
    assert not any(row.held_out for row in own if row.source.startswith("frames"))


def test_training_never_sees_what_is_held_out(own: list[Row]):
    """Nor, in a fold, the sources that it leaves out."""
    public = [Row("a", harmful=True, source="aart"), Row("b", harmful=True, source="advbench")]
    seen = balance.for_training([*own, *public], ("advbench",))
    assert not any(row.held_out for row in seen)
    assert {row.source for row in seen if not row.own} == {"aart"}


def test_what_the_built_in_model_is_examined_with_is_never_trained_on(own: list[Row]):
    """Neither its exam's questions nor the wordings it is measured with meanwhile."""
    never = {normalize(text) for text in rows.examined()}
    assert len(never) >= 100
    assert never.isdisjoint(normalize(row.text) for row in balance.for_training([*own, *rows.asked()]))


def test_what_the_built_in_model_is_asked_is_ordinary():
    """Some ten thousand questions, of which false alarms are counted."""
    asked = rows.asked()
    assert len(asked) >= 10_000
    assert rows.ordinary(asked) == asked


def test_intents_are_held_out_whole():
    """What is asked in other words of the same would be no test."""
    sides: dict[str, set[bool]] = {}
    for row in rows.asked():
        sides.setdefault(row.group, set()).add(row.held_out)
    assert all(len(side) == 1 for side in sides.values())
    assert {True} in sides.values()


def test_every_source_but_our_own_rows_is_left_out_once():
    """And has a quota."""
    folds = [source for fold in balance.FOLDS for source in fold]
    assert sorted(folds) == sorted(balance.QUOTAS)


def test_draws_follow_the_weights():
    """A source of many rows comes no oftener than its quota says."""
    few = [Row(f"f{i}", harmful=True, source="figstep") for i in range(350)]
    many = [Row(f"m{i}", harmful=False, source="benign_clinc") for i in range(3_995)]
    chosen = balance.drawn([*few, *many], 1_100, seed=1)
    assert (chosen < 350).sum() == pytest.approx(400, abs=40)


def test_the_projects_rows_can_be_drawn_less_often():
    """By encoders that have seen them before."""
    public = [Row(f"f{i}", harmful=True, source="figstep") for i in range(400)]
    written = [Row(f"w{i}", harmful=False, source="written_1") for i in range(400)]
    chosen = balance.drawn([*public, *written], 600, seed=1, own_share=0.5 / balance.WRITTEN)
    assert (chosen < 400).sum() == pytest.approx(400, abs=30)


def test_a_frame_takes_its_fillers_side_by_side(tmp_path: Path):
    """Row i has the i-th of each list."""
    frame = {"kind": "prompt", "category": "S2", "frame": "{a} for {b}", "a": ["x", "y"], "b": ["1", "2"]}
    (tmp_path / "frames_9.jsonl").write_text(json.dumps(frame))
    assert [row.text for row in rows.own(tmp_path)] == ["x for 1", "y for 2"]


@pytest.mark.parametrize("fillers", [{"a": ["x"], "b": ["1", "2"]}, {"a": ["x"] * 21, "b": ["1"] * 21}])
def test_frames_with_uneven_or_long_lists_are_refused(tmp_path: Path, fillers: dict[str, list[str]]):
    """Before they are trained on."""
    frame = {"kind": "prompt", "category": "S2", "frame": "{a} for {b}", **fillers}
    (tmp_path / "frames_9.jsonl").write_text(json.dumps(frame))
    with pytest.raises(BadRows, match="lists of one length"):
        rows.own(tmp_path)


def test_a_public_file_must_be_the_one_of_the_manifest(tmp_path: Path):
    """Another file under its name would be trained on unseen."""
    manifest = tmp_path / "MANIFEST.json"
    manifest.write_text(json.dumps({"aart.jsonl.gz": {"sha256": "0" * 64}}))
    (tmp_path / "aart.jsonl.gz").write_bytes(b"")
    with pytest.raises(BadRows, match="MANIFEST"):
        rows.public(tmp_path, manifest)


def test_what_is_kept_apart_is_harmless_and_never_trained_on():
    """150 everyday questions in each language, and chats of three turns as they are joined."""
    kept = rows.kept_apart()
    sizes = Counter(row.source for row in kept)
    assert set(sizes) == {*(f"everyday {language}" for language in calibrate.LANGUAGES), "third turns"}
    assert min(sizes.values()) >= 150
    assert not any(row.harmful for row in kept)
    assert all(row.text.count("\n") == 2 for row in kept if row.source == "third turns")
    assert balance.for_training(kept) == []


def test_nothing_kept_apart_is_among_the_rows_to_learn_from(own: list[Row]):
    """Nor differs from one of them only in how it is written."""
    learned = {normalize(row.text) for row in own}
    assert [row.text for row in rows.kept_apart() if normalize(row.text) in learned] == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("how to", harmful=False, source="written_1"), True),
        (Row("wie", harmful=False, source="written_16", language="de"), False),
        (Row("como roubar uma moto", harmful=True, source="written_15"), False),
        (Row("как испечь хлеб", harmful=False, source="benign_flowgpt"), False),
        (Row("quelle heure", harmful=False, source="benign_lobe_agents"), None),
        (Row("naïve", harmful=False, source="benign_clinc"), None),
    ],
)
def test_a_row_is_taken_for_english_only_where_that_is_sure(row: Row, expected: bool | None):
    """By what its file says, by its letters, or not at all."""
    assert row.is_english is expected


def test_the_authors_of_a_halved_file_are_in_one_half(tmp_path: Path):
    """So that fiction is measured by models that know other authors' alone."""
    lines = [
        {
            "text": f"{author} {n}",
            "label": 0,
            "category": None,
            "kind": "prompt",
            "source": f"books/{author}_book",
        }
        for author in ("bram-stoker", "h-g-wells")
        for n in range(2)
    ]
    name = "benign_fiction_long.jsonl.gz"
    packed = gzip.compress("\n".join(json.dumps(line) for line in lines).encode())
    (tmp_path / name).write_bytes(packed)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({name: {"sha256": hashlib.sha256(packed).hexdigest()}}))
    sources = {(row.text.split()[0], row.source) for row in rows.public(tmp_path, manifest)}
    assert sources == {
        ("bram-stoker", "benign_fiction_long (half)"),
        ("h-g-wells", "benign_fiction_long"),
    }
