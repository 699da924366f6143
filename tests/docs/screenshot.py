"""`python -m tests.docs.screenshot [RUN]`: docs/report.png, the upper part of the report of the demo.

Without RUN, the directory of one, the demo is run first.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import open_browser, opened

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "report.png"
WIDTH = 1040
LAST = "Losses"
"""The last section that is in the picture."""
END = """(title) => {
  const sections = [...document.querySelectorAll("h2")];
  const last = sections.findIndex((heading) => heading.textContent.trim() === title);
  return sections[last + 1].getBoundingClientRect().top + scrollY;
}"""


def demo(folder: Path) -> Path:
    """Run in a directory of the demo's own: the report names the one that it was submitted from."""
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    subprocess.run([sys.executable, "-m", "chaosrun", "submit", "jobs/bytelm/job.yaml"], cwd=folder, check=True)
    (run,) = (folder / ".chaosrun" / "runs").iterdir()
    return run


def take(run: Path) -> None:
    with open_browser() as browser, opened(browser, run / "report.html", width=WIDTH) as page:
        end = page.evaluate(END, LAST)
        page.page.screenshot(path=PICTURE, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end - 24})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="chaosrun-") as folder:
            take(demo(Path(folder)))
