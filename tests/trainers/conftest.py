"""Names the versions at the end; what is not installed is skipped with the reason."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("jax", "optax", "flax", "orbax-checkpoint", "equinox", "dm-haiku", "google-tunix", "maxtext")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "trainers":
            item.add_marker("trainers")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("trainers: " + ", ".join(map(_named, PACKAGES)))


def _named(package):
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"
