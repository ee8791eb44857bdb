"""Draw the demo's picture: what offloading the optimizer's state changed, and what it left alone."""

from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

BLUE, PALE, ORANGE, GREEN, RED, GREY = "#4c6a92", "#c9d4e3", "#c9862c", "#3f8f6b", "#c0392b", "#8a8a8a"
PARTS = {  # the parts of a peak, from the bottom, and their colors
    "parameters": BLUE,
    "optimizer state": ORANGE,
    "temporary": PALE,
}
LANES = {"compute": BLUE, "load": GREEN, "store": ORANGE}
GIB = 2**30


@dataclass
class Way:
    """One way to run a step on a chip; bytes and seconds."""

    name: str
    parts: dict[str, float]  # of the peak of device memory, by the names of PARTS
    host: int  # state in pinned host memory
    compute: float
    waits: float  # for transfers
    timeline: object = None  # of jo.inspect, where it is compiled

    @property
    def peak(self):
        return sum(self.parts.values())

    @property
    def plain(self):
        """Its name, on one line."""
        return " ".join(self.name.split())


@dataclass
class Shown:
    """The picture's data and words, which the demo's last lines share."""

    model: str  # the model trained here
    losses: dict[str, list[float]]  # by run
    seconds: dict[str, float]  # the median seconds of a step, by run; the runs took turns
    state: dict[str, dict[str, int]]  # by run: bytes by memory kind
    device: str
    large: str  # the compiled model
    chip: str
    capacity: int  # bytes of the chip's memory
    how: str  # compiled or not
    ways: list[Way] = field(default_factory=list)

    @property
    def titles(self):
        """The titles of the picture's parts, in pieces."""
        return {
            "losses": (f"Losses of {self.model}", f"trained on {self.device}", "and median times of a step"),
            "state": ("Where its optimizer state lives",),
            "memory": ("Peak device memory of a step, GiB", self.large, self.how),
            "time": ("Time of that step, ms", "simulated, not measured"),
        }

    def run(self, name):
        return f"{name}, {self.seconds[name] * 1e3:.0f} ms per step"

    @property
    def apart(self):
        """The largest difference between the losses, if both runs exist."""
        return [f"largest difference: {max(apart):.1e}"] if (apart := difference(self.losses)) else []

    def lives(self, name):
        return ", ".join(where(kind, nbytes) for kind, nbytes in sorted(self.state[name].items()))

    def peak(self, way):
        return ("does not fit, " if way.peak > self.capacity else "") + f"{way.peak / GIB:.0f}"

    @property
    def limit(self):
        return f"an {self.chip} has {self.capacity / GIB:.0f}"

    def time(self, way):
        fits = "" if way.peak <= self.capacity else "if it fit, "
        return f"{fits}{(way.compute + way.waits) * 1e3:,.0f}, waits for transfers {way.waits * 1e3:,.0f}"


def size(model):
    """Return the size of a model as people write it: 7B for 7b, tiny for tiny."""
    return model.upper() if model[0].isdigit() else model


def where(kind, nbytes):
    return f"{'host memory' if kind == 'pinned_host' else 'device'} {nbytes / 2**20:.1f} MiB"


def draw(shown, path):
    figure = Figure(figsize=(15, 9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
    figure.suptitle("The same training with the optimizer's state in host memory", fontsize=16, x=0.012, ha="left")
    grid = figure.add_gridspec(2, 1, height_ratios=[1.25, 1.0])
    top = grid[0].subgridspec(1, 4, width_ratios=[1.5, 1.0, 1.15, 1.0])
    losses = top[0].subgridspec(2, 1, height_ratios=[3.2, 1.0])
    _losses(figure.add_subplot(losses[0]), figure.add_subplot(losses[1]), shown)
    _state(figure.add_subplot(top[1]), shown)
    _peaks(figure.add_subplot(top[2]), shown)
    _times(figure.add_subplot(top[3]), shown)
    _timelines(figure.add_subplot(grid[1]), shown)
    figure.savefig(path, dpi=120)
    return figure


def _losses(axes, below, shown):
    colors = {"resident": "#e0b070", "offloaded": BLUE}
    for name, widths in (("resident", 4.0), ("offloaded", 0.9)):
        values = shown.losses.get(name, [])
        if values:
            steps = range(1, len(values) + 1)
            axes.plot(steps, values, color=colors[name], linewidth=widths, label=shown.run(name))
    axes.set_title(",\n".join(shown.titles["losses"]), loc="left", fontsize=10)
    axes.set_ylabel("loss, nats per byte")
    axes.legend(frameon=False, fontsize=9)
    axes.tick_params(labelbottom=False)
    apart = difference(shown.losses)
    below.plot(range(1, len(apart) + 1), apart, color=RED, linewidth=0.9)
    below.sharex(axes)
    below.set_ylim(0, 1.6 * max([*apart, 1e-9]))
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    below.text(0.99, 0.9, "".join(shown.apart), transform=below.transAxes, ha="right", va="top", fontsize=8)
    below.set_xlabel("step")
    _frame(axes), _frame(below)


def difference(losses):
    """Return the distance between the losses at each step that both runs took."""
    n = min((len(values) for values in losses.values()), default=0) if len(losses) > 1 else 0
    return [abs(a - b) for a, b in zip(*(values[:n] for values in losses.values()), strict=True)] if n else []


def _state(axes, shown):
    """Show where the trained state lives."""
    for x, (_, kinds) in enumerate(shown.state.items()):
        bottom = 0.0
        for kind, nbytes in sorted(kinds.items()):
            mib = nbytes / 2**20
            axes.bar(x, mib, 0.62, bottom=bottom, color=GREEN if kind == "pinned_host" else ORANGE)
            if mib > 0.05 * sum(kinds.values()) / 2**20:
                label = where(kind, nbytes).replace(" memory ", " memory\n").replace("device ", "device\n")
                axes.text(x, bottom + mib / 2, label, ha="center", va="center", color="white", fontsize=9)
            bottom += mib
    axes.set_xticks(range(len(shown.state)), list(shown.state))
    axes.set_title(",\n".join(shown.titles["state"]), loc="left", fontsize=10)
    _frame(axes)


def _peaks(axes, shown):
    names = [way.name for way in shown.ways]
    bottom = np.zeros(len(names))
    for part, color in PARTS.items():
        heights = np.array([way.parts.get(part, 0) / GIB for way in shown.ways])
        if heights.max(initial=0) > 0.005 * max((way.peak for way in shown.ways), default=0) / GIB:
            axes.bar(range(len(names)), heights, 0.66, bottom=bottom, color=color, label=part)
        bottom += heights
    for x, total in enumerate(bottom):
        over = total > shown.capacity / GIB
        label = shown.peak(shown.ways[x]).replace("does not fit, ", "does\nnot fit\n")
        axes.text(x, total * 1.02, label, ha="center", va="bottom", fontsize=10, color=RED if over else "black",
                  weight="bold")  # fmt: skip
    axes.axhline(shown.capacity / GIB, color=RED, linewidth=1.0, linestyle="--")
    axes.text(len(names) - 0.55, shown.capacity / GIB * 1.01, shown.limit,
              color=RED, ha="right", va="bottom", fontsize=9)  # fmt: skip
    axes.set_ylim(0, 1.5 * max(bottom.max(initial=0), shown.capacity / GIB))
    axes.set_xticks(range(len(names)), names)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2, columnspacing=1.0, handlelength=1.2)
    axes.set_title(",\n".join(shown.titles["memory"]), loc="left", fontsize=10)
    _frame(axes)


def _times(axes, shown):
    for x, way in enumerate(shown.ways):
        fits = way.peak <= shown.capacity
        axes.bar(x, way.compute * 1e3, 0.66, color=BLUE if fits else "white", edgecolor=BLUE, linewidth=1.0,
                 hatch="" if fits else "///", label="arithmetic" if fits else None)  # fmt: skip
        axes.bar(x, way.waits * 1e3, 0.66, bottom=way.compute * 1e3, color=RED, label="waits for transfers")
        total = (way.compute + way.waits) * 1e3
        axes.text(x, total * 1.015, f"{total:,.0f}", ha="center", fontsize=10, weight="bold")
    most = max([way.compute + way.waits for way in shown.ways], default=1.0) * 1e3
    axes.set_ylim(0, 1.3 * most)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, loc="upper left", ncols=2)
    axes.set_xticks(range(len(shown.ways)), [way.name for way in shown.ways])
    axes.set_title(",\n".join(shown.titles["time"]) + "\n(hatched: if it fit)", loc="left", fontsize=10)
    _frame(axes)


def _timelines(axes, shown):
    """Draw the lanes of every way that moves a state, on one axis of time."""
    ways = [way for way in shown.ways if way.timeline is not None and way.host]
    axes.set_title(
        "Where the time of that step goes, ms (red: arithmetic waits for the link)",
        loc="left",
        fontsize=10,
    )
    if not ways:
        axes.text(0.5, 0.5, "The timeline needs XLA's compiler for the chip: pip install 'jax_offload[aot]'",
                  ha="center", va="center", transform=axes.transAxes, color=GREY)  # fmt: skip
        axes.set_axis_off()
        return
    ticks, row = {}, 0.0
    for way in ways:
        axes.text(0, row - 0.62, way.plain, fontsize=10, weight="bold", va="center")
        for lane, color in LANES.items():
            segments = [s for s in way.timeline.segments if s.lane == lane]
            axes.broken_barh(spans([(s.begin, s.end) for s in segments], way.timeline.step), (row - 0.36, 0.72),
                             color=color, linewidth=0)  # fmt: skip
            ticks[row] = {"compute": "arithmetic", "load": "to the device", "store": "to the host"}[lane]
            row += 1
        axes.broken_barh(spans(way.timeline.waits, way.timeline.step), (row - 3.42, 0.84), color=RED, linewidth=0)
        row += 0.9
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(row - 1.2, -0.95)
    axes.set_xlim(0, max(way.timeline.step for way in ways) * 1e3)
    axes.tick_params(axis="y", length=0)
    _frame(axes, "top", "right", "left")


def spans(pairs, step, finest=1e-3):
    """Return ``(begin, width)`` in ms; spans closer together than ``finest`` of the step become one."""
    joined = []
    for begin, end in sorted(pairs):
        if joined and begin - joined[-1][1] < finest * step:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return [(begin * 1e3, (end - begin) * 1e3) for begin, end in joined]


def _frame(axes, *sides):
    for side in sides or ("top", "right"):
        axes.spines[side].set_visible(False)
