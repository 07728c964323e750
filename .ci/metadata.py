"""Links of the package's description and metadata, for the build backend.

The address of the repository is in the environment variable REPOSITORY_URL, which the release workflow sets, and
nowhere else. With it, links of README.md lead there; without it, the package has no links, and README.md is unchanged.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryLinks(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if repository := os.environ.get("REPOSITORY_URL", "").rstrip("/"):
            readme = re.sub(r"(!\[[^\]]*\])\((?!https?:|#)", rf"\1({repository}/raw/HEAD/", readme)
            readme = re.sub(r"(?<!!)(\[[^\]]*\])\((?!https?:|#)", rf"\1({repository}/blob/HEAD/", readme)
            pages = {"Source": "", "Changelog": "/blob/HEAD/CHANGELOG.md", "Issues": "/issues"}
            metadata["urls"] = {name: repository + page for name, page in pages.items()}
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
