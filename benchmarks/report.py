"""The Markdown of a file of results: what was wrong first, then a short table per part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

GIB = 2**30
Found = dict[str, dict[str, Any]]  # case -> result, of one part


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split("|")
    line = "|---" + "|---:" * (len(columns) - 1) + "|"
    return "\n".join([f"|{head}|", line, *("| " + " | ".join(row) + " |" for row in rows)])


def by_part(data: dict[str, Any]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for entry in data["cases"]:
        found.setdefault(entry["part"], {})[entry["case"]] = entry["result"]
    return found


def wrong(data: dict[str, Any]) -> list[str]:
    """Return all values, places and buffers that are not as they should be."""
    return [f"{e['part']}, {e['case']}: {what}" for e in data["cases"] for what in e["result"].get("wrong", [])]


def failed(data: dict[str, Any]) -> list[str]:
    return [f"{e['part']}, {e['case']}: {e['result']['error']}" for e in data["cases"] if "error" in e["result"]]


def without(results: Found, columns: int, row: Callable[[dict[str, Any]], list[str]]) -> list[list[str]]:
    """Return a row for every case, also for those that have no figures."""
    rows = []
    for name, r in results.items():
        reason = f"did not run: {r['error']}" if "error" in r else r.get("left_out")
        rows.append([name, reason, *[""] * (columns - 1)] if reason else [name, *row(r)])
    return rows


def right(result: dict[str, Any]) -> str:
    return "**wrong**" if result["wrong"] else "right"


def milliseconds(seconds: float | None) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds is not None else ""


def gib(nbytes: int | None) -> str:
    return f"{nbytes / GIB:.2f}" if nbytes is not None else ""


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
            right(r),
        ]

    head = " case | worst leaf after a step | last loss | … by the last bit | leaves on the host | "
    return table(head, without(results, 5, row))


def random(results: Found) -> str:
    """How many random steps were equal in each mode."""
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
    """Rates by size of a copy, the best over copies in flight."""
    rows = [row for r in results.values() for row in r.get("rows", [])]
    if not rows:
        return "Nothing was measured."
    kinds = sorted({(r["by"], r["direction"]) for r in rows})

    def rate(kind: tuple[str, str], mib: int) -> str:
        found = [r for r in rows if (r["by"], r["direction"]) == kind and r["mib"] == mib]
        fastest = max(found, key=lambda r: r["bytes_per_second"], default=None)
        return f"{fastest['bytes_per_second'] / 1e9:.1f} ({fastest['in_flight']})" if fastest else ""

    head = " MiB | " + " | ".join(f"{by}, {direction}" for by, direction in kinds) + " "
    about = "GB/s in each direction that is used, the best over the copies in flight (how many)."
    sizes = sorted({r["mib"] for r in rows})
    return f"{table(head, [[str(mib), *(rate(kind, mib) for kind in kinds)] for mib in sizes])}\n\n{about}"


def steps(results: Found) -> str:
    def row(r: dict[str, Any]) -> list[str]:
        seen, peak, own = r["predicted"], r["device_peak_bytes"], r["median_step_seconds"]
        guess = seen["step_seconds"]
        return [
            f"{milliseconds(own)} ({milliseconds(min(r['step_seconds']))}–{milliseconds(max(r['step_seconds']))})",
            f"{milliseconds(guess)} ({guess / own - 1:+.0%})" if guess else "",
            gib(peak),
            gib(seen["peak_bytes"]) + (f" ({seen['peak_bytes'] / peak - 1:+.1%})" if peak else ""),
            milliseconds(r["profile"]["exposed"]) if "profile" in r else "",
            f"{r['losses'][-1]:.4f}",
        ]

    head = " case | step, ms | … simulated | peak, GiB | … compiled | copies alone, ms | last loss "
    return table(head, without(results, 6, row))


def compiled(results: Found) -> str:
    def row(r: dict[str, Any]) -> list[str]:
        seen = r["predicted"]
        moved = f"{seen['loaded_bytes'] / 1e9:.1f} + {seen['stored_bytes'] / 1e9:.1f}"
        times = milliseconds(seen["step_seconds"]), milliseconds(seen["exposed_seconds"])
        return [gib(seen["peak_bytes"]), gib(seen["host_bytes"]), moved, f"{seen['hidden']:.0%}", *times]

    head = " case | peak, GiB | host, GiB | GB in + out | hidden | step, simulated, ms | … of it exposed "
    return "**Compiled, not run.** No time was measured.\n\n" + table(head, without(results, 6, row))


def driven(results: Found) -> str:
    def row(r: dict[str, Any]) -> list[str]:
        return [
            f"{r['losses_apart'][-1]:.0e}",
            milliseconds(r["median_step_seconds"]),
            milliseconds(r["resident_median_step_seconds"]),
            r["leaves_that_stayed_in_their_memory"],
            right(r),
        ]

    head = " case | last loss | step, ms | … resident | stayed in their memory | "
    return table(head, without(results, 5, row))


TABLES = {each.__name__: each for each in (values, random, reports, link, steps, compiled, driven)}


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
