"""Pictures of the page (docs/watching.md), in a real browser; fails if the page does not work.

    pip install playwright; apt-get install chromium
    python tools/page_pictures.py docs

A job of four ranks in which rank 2 is late, then one in which rank 1 hangs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

RANK = """
import math, sys, time
import numpy as np
import hororing.numpy as hvd
from hororing.extension import show

def load_batch(step):
    time.sleep(0.02 + 0.1 * (hvd.rank() == 2 and step > 120))
    if hvd.rank() == 1 and "hang" in sys.argv and step > 60:
        time.sleep(1000)

hvd.init()
for step in range(100_000):
    load_batch(step)
    handles = [hvd.allreduce_async(np.ones(200_000, np.float32), name=f"g{i}") for i in range(8)]
    for handle in handles:
        hvd.synchronize(handle)
    show(step, loss=2.3 * math.exp(-step / 200) + 0.1, samples=32 * step)
"""


def main(folder: Path) -> None:
    """Write page-light.png, page-dark.png, page-phone.png and page-hang.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        with Job() as url:
            page = visit(browser, url, "light", 1100, 900)
            page.wait_for_timeout(45_000)  # so that there is a line, and a turn in it
            page.get_by_text("rank 2 is late").first.wait_for()
            page.screenshot(path=folder / "page-light.png")
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=folder / "page-dark.png")
            page.emulate_media(color_scheme="light")
            page.set_viewport_size({"width": 390, "height": 844})
            page.wait_for_timeout(1500)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, "it is too wide"
            page.screenshot(path=folder / "page-phone.png")
        with Job("hang") as url:
            page = visit(browser, url, "light", 1100, 640)
            page.get_by_text("ranks 0, 2, 3 have waited").first.wait_for()
            page.get_by_text("in load_batch").first.wait_for()
            page.screenshot(path=folder / "page-hang.png")
        browser.close()
    for file in folder.glob("page-*.png"):  # a quarter of the size
        Image.open(file).quantize(96).save(file, optimize=True)


def visit(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    """Open the page; an error in it, or a request to elsewhere, fails."""
    page = browser.new_page(
        color_scheme=scheme, viewport={"width": width, "height": height}, device_scale_factor=1
    )
    page.set_default_timeout(120_000)

    def fail(what: object) -> None:
        print(f"page_pictures: {what}", file=sys.stderr)
        raise SystemExit(1)

    page.on("pageerror", fail)
    page.on("request", lambda request: None if "//127.0.0.1:" in request.url else fail(request.url))
    page.goto(url)
    assert "token" not in page.url
    return page


class Job:
    """A job under hororun; entering it returns the address of its page."""

    def __init__(self, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        script = Path(self._folder.name, "train.py")
        script.write_text(RANK)
        hororun = [sys.executable, "-m", "hororing.hororun", "--grace", "1", "--page", "0"]
        self._process = subprocess.Popen(
            # env: the page shows how a rank was called, and no path of this machine.
            [*hororun, "-np", "4", "env", "python", script.name, *arguments],
            cwd=self._folder.name,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> str:
        assert self._process.stderr is not None
        found = re.search(r"http://\S+", self._process.stderr.readline())
        assert found
        time.sleep(1)
        return found[0]

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()
        self._folder.cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
