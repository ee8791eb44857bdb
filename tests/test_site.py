"""The documentation builds as a site; every warning of mkdocs is an error (make docs)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_offload as jo

pytestmark = pytest.mark.long("builds the site")

ROOT = Path(__file__).parents[1]


def test_the_site(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\nThe site needs the extra docs: pip install '.[docs]'"

    page = (tmp_path / "api.html").read_text()
    names = [name for name in jo.__all__ if name != "types"] + [f"types.{name}" for name in jo.types.__all__]
    missing = [name for name in names if f'id="jax_offload.{name}"' not in page]
    assert not missing
    assert "Raises:" in page
    code = re.findall(r"<code>(.*?)</code></pre>", page, re.DOTALL)  # examples are code, and not quotations
    assert sum("&gt;&gt;&gt;" in block for block in code) > 25 and "<blockquote>" not in page
    assert "``" not in page  # griffe takes the whole description of a result, with its lines and colons

    # Links name files: a folder opened from disk would show its contents, not its index.
    links = re.findall(r'<a [^>]*href="([^"#:]+)["#]', (tmp_path / "index.html").read_text())
    assert {"recipes.html", "plan.html", "troubleshooting.html"} <= {*links}
    assert all((tmp_path / link).is_file() for link in links)
    assert "files/examples/" in (tmp_path / "index.html").read_text()
    assert ">param_sharding<" in (tmp_path / "files/examples/multihost_lm.py.html").read_text()

    elsewhere = r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="(https?:[^"]*)"'
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(elsewhere, page.read_text()), page  # pages are whole without a network

    index = (tmp_path / "search/search_index.json").read_text()
    for error in ("memory_space of all inputs", "E1200", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "Memory kind mismatch"):
        assert error in index
