# SPDX-License-Identifier: Apache-2.0
"""Build the documentation, open every page in Chromium, and print what a reader would stumble over.

No page may scroll sideways on a desk or a phone, every link and anchor leads somewhere, every code block has a copy
button, and the site's own search finds the page that a reader means among its first three results.

    python -m tests.site                  # or: make site-check
    python -m tests.site --chromium /path/to/chrome
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = Path(__file__).resolve().parents[2]
BROWSERS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
WIDTHS = [1440, 390]  # pixels: a desk, a phone
LIMIT = 300  # seconds for all pages and searches
TROUBLE = "guides/when-it-goes-wrong"
SEARCHES = {
    "OOM": TROUBLE,
    "out of memory": TROUBLE,
    "hang": TROUBLE,
    "troubleshooting": TROUBLE,
    "NaN": TROUBLE,
    "slow": "guides/tune",
    "memory": "guides/choose-a-layout",
    "which parallelism": "guides/choose-a-layout",
    "wandb": "guides/doors",
    "resume": "guides/checkpoints",
    "checkpoint": "guides/checkpoints",
    "export": "guides/hugging-face",
    "LoRA": "guides/adapters",
    "FSDP": "guides/from-ddp",
    "DeepSpeed": "guides/from-deepspeed",
    "FP8": "guides/precision",
    "packing": "guides/data",
    "Ray": "guides/ray",
    "SLURM": "start/cluster",
    "glossary": "glossary",
}
"""What a reader types, and the page that answers it."""


class Page(HTMLParser):
    """The anchors of a page, and the addresses it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors = {""}
        self.addresses: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in {"href", "src"} and value:
                self.addresses.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield each address inside the site that leads nowhere."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for address in sorted(page.addresses):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                yield f"{path.relative_to(site.resolve())} has a broken link: {address}"


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and the page that looks at it; keeps the report that this page sends."""

    plan: dict[str, Any]
    report: dict[str, Any] = {}  # noqa: RUF012
    done = threading.Event()

    def do_GET(self) -> None:
        answers = {
            "/check": ("text/html", (Path(__file__).with_name("check.html")).read_bytes()),
            "/plan": ("application/json", json.dumps(self.plan).encode()),
        }
        if self.path not in answers:
            super().do_GET()
            return
        kind, body = answers[self.path]
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        Handler.report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


def look(chromium: str, site: Path, folder: Path) -> dict[str, Any] | None:
    """Open every page in a browser; return what the pages show, or None if the browser did not finish."""
    pages = sorted(path.parent.relative_to(site).as_posix() + "/" for path in site.rglob("index.html"))
    names = ["" if name == "./" else name for name in pages]
    Handler.plan = {"pages": names, "widths": WIDTHS, "words": list(SEARCHES)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--window-size=1500,1000"]
    flags += ["--no-first-run", f"--user-data-dir={folder}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium has no sandbox for root
    url = f"http://127.0.0.1:{server.server_port}/check"
    quiet = subprocess.DEVNULL
    with subprocess.Popen([chromium, *flags, url], stdout=quiet, stderr=quiet) as browser:
        finished = Handler.done.wait(LIMIT)
        browser.terminate()
    server.shutdown()
    return Handler.report if finished else None


def missed(found: dict[str, list[str]]) -> Iterator[str]:
    """Yield each word whose page is not among the first three results."""
    for word, page in SEARCHES.items():
        first = [address.strip("/") for address in found[word]]
        if page not in first:
            yield f"the search for {word!r} finds {', '.join(first) or 'nothing'}, not {page}"


def main() -> int:
    """Print what is wrong; the exit code is 1 if something is, and 2 without a browser."""
    parser = argparse.ArgumentParser(prog="python -m tests.site", description="Check the documentation in a browser.")
    parser.add_argument("--chromium", default=next(filter(None, map(shutil.which, BROWSERS)), None), help="a browser")
    chromium = parser.parse_args().chromium
    if not chromium or not shutil.which(chromium):
        print("no Chromium found; install chromium or google-chrome, or name it with --chromium PATH", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        site = Path(folder, "site")
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(site)]
        subprocess.run(build, cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
        report = look(chromium, site, Path(folder, "profile"))
        if report is None:
            print(f"{chromium} did not look at all pages within {LIMIT} s", file=sys.stderr)
            return 1
        faults = [*broken_links(site), *report["faults"], *missed(report["found"])]
    print("\n".join(faults) or f"{len(Handler.plan['pages'])} pages and {len(SEARCHES)} searches: nothing is wrong")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
