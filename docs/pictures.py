"""Draw the schemes of the documentation: ``python docs/pictures.py`` writes them beside itself."""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, BLUE, PALE, ORANGE, GREEN, RED, GREY = "#26323f", "#4c6a92", "#dbe3ee", "#c9862c", "#3f8f6b", "#c0392b", "#7b8794"


class Drawing:
    """The shapes of an SVG, in pixels from the top left."""

    def __init__(self, width: int, height: int) -> None:
        self.size, self.shapes = (width, height), list[str]()

    def box(self, x: float, y: float, w: float, h: float, color: str, text: str = "", ink: str = "white") -> None:
        self.shapes.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{color}"/>')
        lines = text.split("\n") if text else []
        for k, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + 17 * (k - (len(lines) - 1) / 2), line, ink, "middle")

    def text(self, x: float, y: float, text: str, color: str = INK, anchor: str = "start", bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], color: str = GREY, label: str = "") -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6" '
                           'marker-end="url(#end)"/>')  # fmt: skip
        (x0, y0), (x1, y1) = points[0], points[1]
        if label:
            across = abs(x1 - x0) > abs(y1 - y0)
            self.text((x0 + x1) / 2 if across else x0 + 7, y0 - 6 if across else (y0 + y1) / 2 + 4, label, INK,
                      "middle" if across else "start")  # fmt: skip

    def save(self, name: str) -> None:
        w, h = self.size
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
                'font-family="system-ui, sans-serif" font-size="14">')  # fmt: skip
        marker = ('<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                  f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>')  # fmt: skip
        back = f'<rect width="{w}" height="{h}" fill="white"/>'
        Path(__file__).with_name(name).write_text("\n".join([head, marker, back, *self.shapes, "</svg>\n"]))


def decision() -> None:
    d = Drawing(880, 520)
    d.box(20, 20, 250, 60, BLUE, "Does the resident step fit?\n(jo.plan, row resident)")
    d.box(450, 20, 410, 60, GREEN, "Do not offload: it only costs time")
    d.box(20, 130, 250, 50, BLUE, "What fills the device?")
    d.box(450, 105, 410, 44, PALE, "activations: jax.checkpoint, or offload those", INK)
    d.box(450, 161, 410, 44, PALE, "parameters, gradients: more devices, FSDP", INK)
    d.box(20, 240, 250, 50, BLUE, "Do you clip by the\nglobal norm?")
    d.box(20, 350, 250, 50, GREEN, "jo.offload(tx), jo.jit(step)")
    d.box(450, 240, 410, 50, GREEN, "jo.offload(tx), jo.pipelined(step)")
    d.box(20, 440, 250, 44, BLUE, "More tokens than the\ntable below asks for?")
    d.box(360, 440, 140, 44, GREEN, "Transfers hide")
    d.box(560, 440, 300, 44, PALE, "fraction=, storage=, shard_over=,\nor more tokens", INK)
    d.arrow((270, 50), (448, 50), label="yes")
    d.arrow((145, 80), (145, 128), label="no")
    d.arrow((270, 150), (448, 127))
    d.arrow((270, 160), (448, 183))
    d.arrow((145, 180), (145, 238), label="the optimizer's state")
    d.arrow((270, 265), (448, 265), label="yes")
    d.arrow((145, 290), (145, 348), label="no")
    d.arrow((145, 400), (145, 438))
    d.arrow((655, 290), (655, 415), (290, 415), (240, 438))
    d.arrow((270, 462), (358, 462), label="yes")
    d.arrow((145, 484), (145, 506), (710, 506), (710, 486))
    d.text(160, 501, "no: move fewer bytes", INK)
    d.save("decision.svg")


def memory() -> None:
    """Draw the memory of a model with AdamW; heights are to scale."""
    d, unit, bottom = Drawing(880, 346), 60, 290
    for x, title, parts in (
        (40, "resident\nat all times", [("parameters", BLUE, 1), ("gradients", "#8fa6c4", 1), ("mu, nu", ORANGE, 2)]),
        (250, "usual recipe\nbetween steps", [("parameters", BLUE, 1)]),
        (450, "usual recipe\ninside the step", [("parameters", BLUE, 1), ("gradients", "#8fa6c4", 1),
                                                ("mu, nu: all loaded", ORANGE, 2)]),
        (660, "jax_offload\ninside the step", [("parameters", BLUE, 1), ("gradients", "#8fa6c4", 1),
                                               ("window", ORANGE, 0.4)]),
    ):  # fmt: skip
        y = bottom
        for text, color, height in parts:
            y -= height * unit
            d.box(x, y, 170, height * unit - 2, color, text)
        for k, line in enumerate(title.split("\n")):
            d.text(x + 85, bottom + 22 + 18 * k, line, INK, "middle", bold=not k)
    d.shapes.append(f'<line x1="20" x2="860" y1="{bottom}" y2="{bottom}" stroke="{INK}"/>')
    d.text(20, 24, "Device memory without activations. The peak inside the step is what runs out.", INK, bold=True)
    d.save("memory.svg")


def stream() -> None:
    """Draw an unrolled step, from the last layer to the first, with a window for two layers."""
    d, left, w = Drawing(880, 350), 150, 126
    rows = {"backward pass": 50, "host to device": 98, "update": 146, "device to host": 194, "the window": 254}
    d.text(
        20, 28, "A layer's state is loaded, updated and stored while the passes of other layers run.", INK, bold=True
    )
    for name, y in rows.items():
        d.text(left - 14, y + 22, name, INK, "end")
    for k, layer in enumerate((3, 2, 1, 0)):
        x = left + k * w
        d.box(x, rows["backward pass"], w - 4, 34, BLUE, f"gradient {layer}")
        d.box(x + 0.5 * w, rows["host to device"], 0.84 * w, 34, GREEN, f"load {layer}")
        d.box(x + 1.36 * w, rows["update"], 0.28 * w, 34, BLUE, f"{layer}")
        d.box(x + 1.66 * w, rows["device to host"], 0.84 * w, 34, ORANGE, f"store {layer}")
        d.box(
            x + 0.5 * w, rows["the window"] + 38 * (k % 2), 2 * w - 4, 34, RED, f"mu, nu of layer {layer} on the device"
        )
    d.save("stream.svg")


def turned() -> None:
    """Draw where the update runs under ``jax.jit``, ``jo.jit`` and ``jo.pipelined``, beside the link."""
    d, left, w = Drawing(900, 470), 130, 62

    def lanes(y: int, title: str) -> None:
        d.text(20, y, title, INK, bold=True)
        for lane, at in ("passes", 40), ("updates", 80), ("the link", 113):
            d.text(left - 14, y + at, lane, INK, "end")

    def layer(x: float, y: int, name: str, k: int) -> None:
        d.box(x, y + 18, w - 4, 34, *((PALE, f"{name} {k}", INK) if name == "fwd" else (BLUE, f"{name} {k}")))

    def update(x: float, y: int, k: int) -> None:
        d.box(x, y + 61, 0.36 * w, 28, GREEN, f"{k}")

    lanes(24, "jax.jit: the state moves after the backward pass, and the arithmetic waits (red).")
    for k in range(4):
        layer(left + k * w, 24, "fwd", k)
        layer(left + (k + 4) * w, 24, "bwd", 3 - k)
        x = left + 8 * w + k * w
        d.box(x, 42, 0.6 * w, 34, RED)
        update(x + 0.62 * w, 24, k)
        d.box(x, 121, w - 2, 22, ORANGE)
    lanes(184, "jo.jit, without clipping: a layer is updated in the iteration that makes its gradient.")
    for k in range(4):
        layer(left + k * w, 184, "fwd", k)
        layer(left + (k + 4) * w, 184, "bwd", 3 - k)
        update(left + (k + 4) * w + 0.6 * w, 184, 3 - k)
        d.box(left + (k + 4) * w, 281, w - 2, 22, ORANGE)
    lanes(344, "jo.pipelined, with clipping: the next batch's forward pass updates each layer.")
    for k in range(4):
        layer(left + k * w, 344, "bwd", 3 - k)
        layer(left + (k + 4) * w + 14, 344, "fwd", k)
        update(left + (k + 4) * w + 14, 344, k)
        d.box(left + (k + 4) * w + 14, 441, w - 2, 22, ORANGE)
    line = left + 4 * w + 5
    d.shapes.append(f'<line x1="{line}" x2="{line}" y1="356" y2="464" stroke="{RED}" stroke-width="2"/>')
    d.text(line - 8, 424, "the norm is known", RED, "end")
    d.save("turned.svg")


if __name__ == "__main__":
    for draw in (decision, memory, stream, turned):
        draw()
