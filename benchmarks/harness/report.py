"""The Markdown of a file of results: its tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.harness.readings import Entry, model_of, overhead, rate_while_copying, seconds

GIB = 2**30
LAYERS = {0: "unrolled", 1: "one scan"}
COMPILED = (
    "**Compiled, not run.** Peaks, bytes on the link, the share of them for which nothing waits (hidden) "
    "and the share that moves while the other direction does (both ways): all from the compiled program. No time was "
    "measured."
)


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split("|")
    line = "|---" + "|---:" * (len(columns) - 1) + "|"
    return "\n".join([f"|{head}|", line, *("| " + " | ".join(row) + " |" for row in rows)])


def row(entries: list[Entry], entry: Entry) -> list[str]:
    case, result = entry["case"], entry["result"]
    if "error" in result:
        return [case["system"], f"did not run: {result['error']}", *[""] * 7]
    own, more = seconds(entry), overhead(entries, entry)
    tokens, times = model_of(case)[1], [1e3 * t for t in result.get("step_seconds", [])]
    peak, host = result.get("device_peak_bytes"), result.get("host_taken_bytes", result.get("host_bytes"))
    return [
        case["system"],
        f"{own * 1e3:,.0f} ({min(times):,.0f}–{max(times):,.0f})" if own else "",
        f"{more:+.1%}" if more is not None else "",
        f"{peak / GIB:.1f}" if peak is not None else "",
        f"{host / GIB:.1f}" if host is not None else "",
        f"{tokens / own:,.0f}" if own else "",
        on_the_link(result),
        f"{result['losses'][-1]:.4f}" if result.get("losses") else "",
        "; ".join(result.get("notes", [])),
    ]


def on_the_link(result: dict[str, Any]) -> str:
    if not result.get("loaded_bytes"):
        return ""
    said = f"{result['loaded_bytes'] / 1e9:.1f} + {result['stored_bytes'] / 1e9:.1f}"
    if (rates := rate_while_copying(result)) is not None:
        said += f", {rates[0] / 1e9:.0f} + {rates[1] / 1e9:.0f} GB/s"
    return said + (f"; {result['hidden']:.0%}, {result['duplex']:.0%}" if result.get("compiled") else "")


def cases_tables(entries: list[Entry]) -> str:
    """A table per model, tokens and clipping."""
    kinds: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((*model_of(entry["case"]), entry["case"]["clip"]), []).append(entry)
    parts = []
    for (name, tokens, clip), group in sorted(kinds.items(), key=lambda item: item[0]):
        for scans in sorted({e["case"]["scans"] for e in group}):
            rows = [row(entries, e) for e in group if e["case"]["scans"] == scans]
            compiled = any(e["result"].get("compiled") for e in group)
            title = f"{name}, {LAYERS.get(scans, f'{scans} scans')}, {tokens:,} tokens"
            title += ", clipping" if clip else ", no clipping"
            link = "GB in + out; hidden, both ways" if compiled else "GB in + out, rate"
            head = f" system | step, ms | over resident | peak, GiB | host, GiB | tokens/s | {link} | loss | notes "
            parts.append(f"### {title}{': compiled, not run' if compiled else ''}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def link_table(rows: list[dict[str, Any]]) -> str:
    """Rates by size of a copy, the best over copies in flight."""
    kinds = sorted({(r["by"], r["direction"]) for r in rows})
    sizes = sorted({r["mib"] for r in rows})

    def rate(kind: tuple[str, str], mib: int) -> str:
        found = [r for r in rows if (r["by"], r["direction"]) == kind and r["mib"] == mib]
        if not found:
            return ""
        fastest = max(found, key=lambda r: r["bytes_per_second"])
        return f"{fastest['bytes_per_second'] / 1e9:.1f} ({fastest['in_flight']})"

    head = " MiB | " + " | ".join(f"{by}, {direction}" for by, direction in kinds) + " "
    about = "GB/s in each direction that is used, the best over the copies in flight (how many)."
    return f"{table(head, [[str(mib), *(rate(kind, mib) for kind in kinds)] for mib in sizes])}\n\n{about}"


def markdown(results: dict[str, Any]) -> str:
    about = results["about"]
    parts = [f"# {about['device']}, {about['date']}", f"`{about['command']}`, {about['machine']}."]
    if results.get("link"):
        parts += ["## The link", link_table(results["link"])]
    if results.get("link_error"):
        parts.append(f"Of the link not all was measured: {results['link_error']}")
    if results.get("cases"):
        parts += [COMPILED] * any(e["result"].get("compiled") for e in results["cases"])
        parts += ["## Steps", cases_tables(results["cases"])]
    if results.get("machinery"):
        rows = [[r["what"], *(f"{r[k]:.3f}" for k in ("plain", "ours", "ratio"))] for r in results["machinery"]]
        parts += ["## On the CPU", table(" | plain optax | offloaded | ratio ", rows)]
    return "\n\n".join(parts) + "\n"
