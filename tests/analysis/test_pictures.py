"""How timelines are summed up and drawn, and the pictures of the docs."""

import json
import re
import runpy
from pathlib import Path

import pytest

from benchmarks import break_even
from jax_offload._look.timeline import Segment, Timeline

DOCS = Path(__file__).parents[2] / "docs"


def some(leaves):
    """A step with so many leaves: each is loaded for 1 ms, half of it hidden, updated in 1 ms, and stored."""
    segments, now = [], 0.0
    for k in range(leaves):
        segments.append(Segment("load", now, now + 1e-3, f"state[0].mu['w{k}']", 10**7))
        segments.append(Segment("compute", now, now + 0.5e-3, f"update of 0/mu/w{k}"))
        segments.append(Segment("compute", now + 1e-3, now + 2e-3, "transpose(jvp())/dot_general"))
        segments.append(Segment("store", now + 1e-3, now + 2e-3, f"state[0].mu['w{k}']", 10**7))
        now += 2e-3
    return Timeline(tuple(segments), "h200", leaves * 1e-3, 10**7)


def test_waits_and_sums_come_from_the_segments():
    """Of each 2 ms, the first load is alone for the second half of its time."""
    t = some(3)
    assert sum(t.waits, ()) == pytest.approx((0.0005, 0.001, 0.0025, 0.003, 0.0045, 0.005))
    expected = {"step": 6, "compute": 4.5, "loading": 3, "storing": 3, "overlap": 4.5, "exposed": 1.5, "idle": 0}
    assert {name: getattr(t, name) for name in expected} == pytest.approx({k: v / 1e3 for k, v in expected.items()})
    assert (t.loaded, t.stored) == (3 * 10**7, 3 * 10**7)


def test_a_trace_for_perfetto(tmp_path):
    path = tmp_path / "timeline.json"
    some(3).save(path)
    found = json.loads(path.read_text())
    events = found["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "host to device", 2: "device to host"}
    copies = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert copies[1] | {"args": 0} == {"ph": "X", "pid": 1, "tid": 1, "name": "state[0].mu['w1']", "args": 0,
                                       "ts": pytest.approx(2000), "dur": pytest.approx(1000)}  # fmt: skip
    assert copies[1]["args"] == {"bytes": 10**7}
    with pytest.raises(ValueError, match=r"ends with '.pdf'; expected .json"):
        some(1).save(tmp_path / "a.pdf")


def test_the_table_of_break_even_is_what_its_script_prints():
    assert "\n".join(break_even.rows()) in (DOCS / "plan.md").read_text()


def test_the_chart_of_break_even_is_what_its_script_draws(tmp_path):
    pytest.importorskip("matplotlib")
    break_even.draw(tmp_path / "now.svg")
    there, now = (path.read_text() for path in (DOCS / "break_even.svg", tmp_path / "now.svg"))
    if (by := re.search(r"Matplotlib v[\d.]+", there)[0]) not in now:
        pytest.skip(f"docs/break_even.svg is by {by}: another version draws it otherwise")
    assert now == there, "python -m benchmarks.break_even docs/break_even.svg"


def test_the_pictures_of_the_docs_are_what_their_script_draws(tmp_path):
    script = tmp_path / "pictures.py"  # which writes beside itself
    script.write_text((DOCS / "pictures.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 4
    for path in drawn:
        assert path.read_text() == (DOCS / path.name).read_text(), "python docs/pictures.py"


def test_every_picture_is_shown():
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    shown = {Path(x).name for page in pages for x in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())}
    assert {path.name for path in DOCS.iterdir() if path.suffix in (".svg", ".png")} <= shown
