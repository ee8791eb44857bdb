"""The documentation builds as a site; every warning of mkdocs is an error (make docs)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_offload as jo

pytestmark = pytest.mark.long("builds the site")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\nThe site needs the extra docs: pip install '.[docs]'"
    return folder


def test_every_public_name_is_in_the_reference(site):
    page = (site / "api.html").read_text()
    names = [name for name in jo.__all__ if name != "types"] + [f"types.{name}" for name in jo.types.__all__]
    missing = [name for name in names if f'id="jax_offload.{name}"' not in page]
    assert not missing
    assert "Raises:" in page
    code = re.findall(r"<code>(.*?)</code></pre>", page, re.DOTALL)  # examples are code, and not quotations
    assert sum("&gt;&gt;&gt;" in block for block in code) > 25 and "<blockquote>" not in page
    assert "``" not in page  # griffe takes the whole description of a result, with its lines and colons


def test_links_lead_to_pages_where_the_site_is_read_from_disk(site):
    """Links name files: a folder opened from disk would show its contents, not its index."""
    links = re.findall(r'<a [^>]*href="([^"#:]+)["#]', (site / "index.html").read_text())
    assert {"recipes.html", "plan.html", "troubleshooting.html"} <= {*links}
    assert all((site / link).is_file() for link in links)


def test_pages_are_whole_without_a_network(site):
    """No script, font or picture is fetched from elsewhere."""
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="(https?:[^"]*)"',
                             page.read_text())  # fmt: skip
        assert not fetched, page


def test_files_of_the_repository_are_there_where_pages_link_to_them(site):
    assert "files/examples/" in (site / "index.html").read_text()
    assert ">param_sharding<" in (site / "files/examples/multihost_lm.py.html").read_text()


def test_errors_are_found_by_their_text(site):
    index = (site / "search/search_index.json").read_text()
    for error in ("memory_space of all inputs", "E1200", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "Memory kind mismatch"):
        assert error in index
