"""The Markdown of a run on a GPU: what was wrong first, then a short table per part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness.report import GIB, link_table, table

Found = dict[str, dict[str, Any]]  # case -> result, of one part


def by_part(data: dict[str, Any]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for entry in data["cases"]:
        found.setdefault(entry["part"], {})[entry["case"]] = entry["result"]
    return found


def wrong(data: dict[str, Any]) -> list[str]:
    """All values, places and buffers that are not as they should be."""
    return [f"{e['part']}, {e['case']}: {what}" for e in data["cases"] for what in e["result"].get("wrong", [])]


def failed(data: dict[str, Any]) -> list[str]:
    return [f"{e['part']}, {e['case']}: {e['result']['error']}" for e in data["cases"] if "error" in e["result"]]


def without(results: Found, columns: int, row: Callable[[dict[str, Any]], list[str]]) -> list[list[str]]:
    """A row for every case, also for those that have no figures."""
    rows = []
    for name, r in results.items():
        reason = f"did not run: {r['error']}" if "error" in r else r.get("left_out")
        rows.append([name, reason, *[""] * (columns - 1)] if reason else [name, *row(r)])
    return rows


def values(results: Found) -> str:
    def row(r: dict[str, Any]) -> list[str]:
        path, most = max(r["after_a_step"].items(), key=lambda item: item[1])
        floor = r.get("losses_apart_by_the_last_bit")
        kinds = list(r["memory_kinds"].values())
        return [
            f"{most:.0e} ({path})",
            f"{r['losses_apart'][-1]:.0e}",
            f"{floor[-1]:.0e}" if floor else "",
            f"{kinds.count('pinned_host')} of {len(kinds)}",
            "**wrong**" if r["wrong"] else "right",
        ]

    head = " case | worst leaf after a step | last loss | … by the last bit | leaves on the host | "
    return table(head, without(results, 5, row))


def donation(results: Found) -> str:
    """All patterns in a line each fraction; those that are wrong or failed one by one."""
    fine = {name: r for name, r in results.items() if not r.get("wrong") and "error" not in r}
    rows = without(
        {name: r for name, r in results.items() if name not in fine}, 1, lambda r: ["; ".join(r["wrong"][:3])]
    )
    said = f"{len(fine)} of {len(results)} patterns: values, memory kinds and buffers as they should be."
    if fine:
        said += f" Worst difference to the step without donation: {max(r['apart'] for r in fine.values()):.0e}."
    return said + (f"\n\n{table(' pattern | what was wrong ', rows)}" if rows else "")


def random(results: Found) -> str:
    """How many random steps were equal in each mode; those that were not, one by one."""
    modes: dict[str, list[int]] = {}
    for r in results.values():
        said = modes.setdefault(r.get("mode", "failed"), [0, 0, 0])
        said[0 if "left_out" in r else 1 if r.get("wrong") or "error" in r else 2] += 1
    head = " mode | equal to plain optax | not equal | refused, or plain optax raises "
    rows = [[mode, str(same), str(other), str(left)] for mode, (left, other, same) in sorted(modes.items())]
    return table(head, rows)


def reports(results: Found) -> str:
    """Every report as it was printed."""
    return "\n\n".join(f"`{name}`\n\n```\n{r.get('text') or r.get('error')}\n```" for name, r in results.items())


def link(results: Found) -> str:
    rows = [row for r in results.values() for row in r.get("rows", [])]
    return link_table(rows) if rows else "Nothing was measured."


def steps(results: Found) -> str:
    def gib(x: int | None) -> str:
        return f"{x / GIB:.2f}" if x is not None else ""

    def row(r: dict[str, Any]) -> list[str]:
        predicted, peak, own = r["predicted"], r["device_peak_bytes"], r["median_step_seconds"]
        guess = predicted["step_seconds"]
        return [
            f"{1e3 * own:,.1f}",
            f"{1e3 * guess:,.1f} ({guess / own - 1:+.0%})" if guess else "",
            gib(peak),
            f"{gib(predicted['peak_bytes'])}" + (f" ({predicted['peak_bytes'] / peak - 1:+.1%})" if peak else ""),
            gib(predicted["argument_bytes"]),
            gib(predicted["temp_bytes"]),
            f"{1e3 * r['exposed_seconds']:,.1f}" if "exposed_seconds" in r else "",
        ]

    head = " case | step, ms | … predicted | peak, GiB | … predicted | arguments | temporaries | copies alone, ms "
    return table(head, without(results, 7, row))


def driven(results: Found) -> str:
    def row(r: dict[str, Any]) -> list[str]:
        own, resident = r["median_step_seconds"], r["resident_median_step_seconds"]
        return [
            f"{max(r['after_a_step'].values()):.0e}",
            f"{r['losses_apart'][-1]:.0e}",
            f"{1e3 * own:,.1f}",
            f"{1e3 * resident:,.1f}",
            r["leaves_that_stayed_in_their_memory"],
            "**wrong**" if r["wrong"] else "right",
        ]

    head = " case | worst leaf after a step | last loss | step, ms | … resident | stayed in their memory | "
    return table(head, without(results, 6, row))


TABLES = {
    "values": values,
    "donation": donation,
    "random": random,
    "reports": reports,
    "link": link,
    "steps": steps,
    "driven": driven,
}


def markdown(data: dict[str, Any]) -> str:
    about = data["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    parts = [
        f"# {about['device']}, {about['date']}",
        f"`{about['command']}`, {about['machine']}, Python {about['python']}, {versions}; commit {about['commit']}.",
    ]
    for title, found in (("Wrong", wrong(data)), ("Failed", failed(data))):
        lines = [f"- {line}" for line in found[:20]]
        more = [f"- and {len(found) - 20} more"] if len(found) > 20 else []
        parts.append("\n".join([f"{title}: {len(found) or 'nothing'}.", *([""] if lines else []), *lines, *more]))
    results = by_part(data)
    for part, text in TABLES.items():
        if part in results:
            parts += [f"## {part.capitalize()}", text(results[part])]
        if data["left"].get(part):
            first, more = data["left"][part][:8], len(data["left"][part]) - 8
            others = f" and {more} more" if more > 0 else ""
            parts.append(f"Not run, for lack of time, of `{part}`: {'; '.join(first)}{others}.")
    return "\n\n".join(parts) + "\n"
