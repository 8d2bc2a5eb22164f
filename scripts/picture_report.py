"""A picture of a report for the README, taken by a headless Chromium, which the project itself does not need.

    flow-factory train examples/grpo/lora/sd3_5/tiny.yaml
    python scripts/picture_report.py save/tiny-grpo/report.html guidance/images/report.png

Debian and Ubuntu have it as `apt-get install chromium`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def take(browser: str, page: Path, width: int, height: int, dark: bool) -> Image.Image:
    """The top of a page as a window of that size shows it."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "page.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={width},{height}", f"--screenshot={target}", "--virtual-time-budget=3000"]
        command += [f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(target) as picture:
            return picture.convert("RGB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a report.html")
    parser.add_argument("target", type=Path, help="the PNG to write")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1930)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 2
    picture = take(browser, arguments.page, arguments.width, arguments.height, arguments.dark)
    # 256 colours are enough for a page, and a third of the size.
    picture.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(arguments.target, optimize=True)
    print(f"wrote {arguments.target} ({arguments.target.stat().st_size / 1000:.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
