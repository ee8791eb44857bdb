"""The simulated link counts what a schedule does: nothing overlaps in a serial one, all in a full-duplex one."""

import pytest

from tests.aot.link import hidden, traffic

pytestmark = pytest.mark.oldest("reading what XLA prints")

HEAD = "HloModule m, is_scheduled=true\n\nENTRY %main (a: f32[256]) -> f32[256] {\n"
LOAD = "  %{0}-start = (f32[256]{{0}}, f32[256]{{0:S(5)}}, u32[]) copy-start(%a)\n"
STORE = "  %{0}-start = (f32[256]{{0:S(5)}}, f32[256]{{0}}, u32[]) copy-start(%b)\n"
DONE = "  %{0}-done = f32[256]{{0}} copy-done(%{0}-start)\n"


@pytest.mark.parametrize(
    ("schedule", "duplex"),
    [
        ([(LOAD, "l"), (DONE, "l"), (STORE, "s"), (DONE, "s")], 0.0),
        ([(LOAD, "l"), (STORE, "s"), (DONE, "l"), (DONE, "s")], 1.0),
        ([(LOAD, "l"), (LOAD, "k"), (STORE, "s"), (DONE, "l"), (DONE, "k"), (DONE, "s")], 2 / 3),  # one way queues
        ([(LOAD, "l"), (DONE, "l"), (LOAD, "k"), (STORE, "s"), (DONE, "k"), (DONE, "s")], 2 / 3),
    ],
)
def test_schedules(schedule, duplex):
    moved = traffic(HEAD + "".join(line.format(name) for line, name in schedule) + "}\n")
    loads, stores = (sum(line is kind for line, _ in schedule) * 1024 for kind in (LOAD, STORE))
    assert (moved.loaded, moved.stored) == (loads, stores)
    assert moved.duplex == pytest.approx(duplex)


def test_loops_run_as_often_as_they_say():
    body = "%body (t: (s32[])) -> (s32[]) {\n" + LOAD.format("l") + DONE.format("l") + "}\n\n"
    loop = '  %w = (s32[]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}\n}\n'
    bound = "%c (t: (s32[])) -> pred[] {\n  %k = s32[]{:T(128)} constant(5)\n}\n\n"
    assert traffic(body + bound + HEAD + loop).loaded == 7 * 1024
    assert traffic(body + bound + HEAD + loop.replace("known", "un")).loaded == 5 * 1024


def test_slices_of_a_host_buffer_count_as_their_rows():
    stack, row = "f32[4,256]{1,0:S(5)}", "f32[1,256]{1,0}"
    lines = [
        f"  %l = (({stack}, s32[], s32[]), {row}, u32[]) fusion-start(%a, %i, %z), kind=kLoop, calls=%ds\n",
        f"  %s = (({stack}, {row}, s32[], s32[]), {stack}, u32[]) fusion-start(%a, %x, %i, %z), kind=kLoop\n",
        f"  %d = {row} fusion-done(%l)\n",
        f"  %e = {stack} fusion-done(%s)\n",
    ]
    moved = traffic(HEAD + "".join(lines) + "}\n")
    assert (moved.loaded, moved.stored, moved.duplex) == (1024, 1024, 1.0)


@pytest.mark.parametrize(("body", "expected"), [("%d = f32[] dot(%a, %a)", 1024), ("%d = f32[] add(%a, %a)", 0)])
def test_a_copy_is_hidden_by_a_loop_of_matmuls_not_by_any_loop(body, expected):
    loop = "  %w = (s32[]) while(%t), condition=%c, body=%body\n"
    text = f"%body (t: (s32[])) -> (s32[]) {{\n  {body}\n}}\n\n" + HEAD + LOAD.format("l") + loop + DONE.format("l")
    assert hidden(text + "}\n") == expected
