"""A page in a headless Chromium: what it looks like to its readers."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# Nothing of the browser's own goes to the network.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-breakpad", "--disable-dev-shm-usage"),
)
DESKTOP, PHONE = 1280, 390
HEIGHT = 6000

# Looks at the page within a frame, whose width is that of the reader's screen: a window of a
# headless browser cannot be as narrow as a phone.
LOOK = """
const frame = document.querySelector('iframe'), begun = performance.now();
frame.addEventListener('load', () => {
  const page = frame.contentDocument, view = frame.contentWindow, found = {};
  found.seconds = (performance.now() - begun) / 1000;
  const box = element => element.getBoundingClientRect();
  const root = page.documentElement;
  found.overflow = root.scrollWidth - root.clientWidth;
  found.columns = [...page.querySelectorAll('div.grid, .columns')].map(one =>
    new Set([...one.children].map(child => Math.round(box(child).left))).size);
  found.used = Math.max(...[...page.querySelectorAll('section')].map(one => box(one).right));
  found.height = page.body.offsetHeight;
  found.background = view.getComputedStyle(page.body).backgroundColor;
  found.ink = view.getComputedStyle(page.body).color;
  found.loaded = view.performance.getEntriesByType('resource').map(entry => entry.name);
  found.headings = [...page.querySelectorAll('h2')].map(one => one.textContent);
  found.sizes = ['h1', 'h2', 'h3', 'h4'].flatMap(tag => [...page.querySelectorAll(tag)].slice(0, 1))
    .map(one => parseFloat(view.getComputedStyle(one).fontSize));
  found.charts = page.querySelectorAll('svg.chart').length;
  found.text = page.body.innerText;
  found.outside = [];
  found.overlapping = [];
  found.smallest = 99;
  for (const svg of page.querySelectorAll('svg.chart')) {
    const around = box(svg);
    const texts = [...svg.querySelectorAll('text')].filter(one => one.textContent);
    const boxes = texts.map(box);
    for (const bar of svg.querySelectorAll('rect'))
      if (box(bar).right > around.right || box(bar).bottom > around.bottom)
        found.outside.push('a bar');
    const lines = [...svg.querySelectorAll('.series path:not(.broken)')].map(box);
    texts.forEach((text, i) => {
      const b = boxes[i];
      found.smallest = Math.min(found.smallest, b.height);
      if (b.left < around.left - 2 || b.right > around.right + 2 ||
          b.top < around.top - 2 || b.bottom > around.bottom + 2)
        found.outside.push(text.textContent);
      for (const line of lines)
        if (Math.min(b.right, line.right) - Math.max(b.left, line.left) > 2 &&
            Math.min(b.bottom, line.bottom) - Math.max(b.top, line.top) > 2)
          found.overlapping.push([text.textContent, 'a curve']);
      for (let j = 0; j < i; j++) {
        const c = boxes[j];
        const across = Math.min(b.right, c.right) - Math.max(b.left, c.left);
        const down = Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top);
        if (across > 2 && down > 0.3 * Math.min(b.height, c.height))
          found.overlapping.push([texts[j].textContent, text.textContent]);
      }
    });
  }
  const curve = page.querySelector('svg.lines');
  found.told = '';
  if (curve) {
    const around = box(curve);
    curve.dispatchEvent(new view.PointerEvent('pointermove', {
      clientX: around.left + around.width * 0.5, clientY: around.top + 50}));
    found.told = curve.nextElementSibling.textContent;
    curve.dispatchEvent(new view.PointerEvent('pointerleave'));
  }
  const result = document.createElement('pre');
  result.id = 'found';
  result.textContent = JSON.stringify(found);
  document.body.append(result);
});
"""


@dataclass(frozen=True)
class Seen:
    """What there is to be seen of a page.

    Attributes:
        overflow: by how many pixels it is wider than the screen.
        height: of the whole page.
        columns: figures side by side in each grid, and sections of tables at the end.
        used: pixels from the left edge to the right end of the sections.
        background: colour behind everything.
        ink: colour of its text.
        loaded: what it fetched from elsewhere.
        headings: of its sections.
        sizes: font sizes in pixels of the first heading of each level.
        charts: how many.
        text: all that can be read.
        outside: texts and bars of charts that stick out of them.
        overlapping: pairs of texts of a chart that lie on each other, and texts on curves.
        smallest: height in pixels of the smallest text of a chart.
        told: what the first curve told when a pointer was over it.
        seconds: how long the page took to open.
    """

    overflow: int
    height: int
    columns: list[int]
    used: float
    background: str
    ink: str
    loaded: list[str]
    headings: list[str]
    sizes: list[float]
    charts: int
    text: str
    outside: list[str]
    overlapping: list[list[str]]
    smallest: float
    told: str
    seconds: float

    def check(self) -> None:
        """Check what holds for every page."""
        assert self.overflow <= 0
        assert self.loaded == []
        assert self.outside == []
        assert self.overlapping == []
        assert self.smallest >= 9


class Browser:
    """Looks at pages.

    Args:
        folder: for its files and pictures, which stay there.
    """

    def __init__(self, folder: Path) -> None:
        found = [path for name in CHROMIUM if (path := shutil.which(name))]
        if not found:
            pytest.skip("no Chromium to look at reports with: apt-get install chromium")
        self._program = found[0]
        self._folder = folder

    def look(self, page: str, *, width: int = DESKTOP, dark: bool = False) -> Seen:
        """Return what is seen of a page; a picture of it is kept beside.

        Args:
            page: its HTML.
            width: of the screen, in pixels.
            dark: whether its reader prefers a dark theme.
        """
        name = f"{'dark' if dark else 'light'}-{width}"
        outer = self._folder / f"{name}.html"
        scheme = "dark" if dark else "light"
        outer.write_text(
            f'<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="{scheme}">'
            f"<style>body{{margin:0}}iframe{{border:0;width:{width}px;height:{HEIGHT}px}}</style>"
            f'<body><iframe srcdoc="{html.escape(page)}"></iframe><script>{LOOK}</script>',
            encoding="utf-8",
        )
        window = f"--window-size={max(width, 520)},{HEIGHT}"
        theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        picture = self._folder / f"{name}.png"
        # One visit for the picture, one for what the script has found.
        self._run(window, theme, f"--screenshot={picture}", outer.as_uri())
        told = self._run(window, theme, "--dump-dom", outer.as_uri())
        found = re.search(r'<pre id="found">(.*?)</pre>', told, re.S)
        assert found, f"the page's script did not run: {told[-500:]}"
        return Seen(**json.loads(html.unescape(found[1])))

    def _run(self, *arguments: str) -> str:
        profile = self._folder / "profile"
        command = [self._program, *OPTIONS, f"--user-data-dir={profile}", *arguments]
        # Of its own, for what its processes may leave there; short, as it holds sockets.
        temporary = tempfile.mkdtemp(prefix="c-")
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "TMPDIR": temporary},
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
        finally:
            for folder in (profile, temporary):
                shutil.rmtree(folder, ignore_errors=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout
