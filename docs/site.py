"""What lies outside of docs/ and is part of the site: README.md, the example jobs, the licence. A hook of MkDocs."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = ("README.md", "LICENSE", "jobs/*/*.py", "jobs/*/job.yaml")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    for path in sorted(path for pattern in OUTSIDE for path in root.glob(pattern)):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are written as they are right in the repository; in the site what lies above docs/ lies beside its pages."""
    outside = "docs/" if page.file.src_uri == "README.md" else "../"
    return markdown.replace(f"]({outside}", "](")
