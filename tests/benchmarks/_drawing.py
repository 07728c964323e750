"""Pictures of what benchmarks found, for pages that are light or dark."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

COLOURS = {"stock": "#c0693f", "ours": "#3a86b4", "compile": "#3f9a6d"}  # read on white and on black


def pyplot() -> Any:
    """Matplotlib's pyplot without a display; text stays text, and the same results make the same file."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lazymodel", "font.size": 9})
    mpl.rcParams.update({"axes.edgecolor": "#888", "xtick.color": "#888", "xtick.labelcolor": "#222"})
    mpl.rcParams.update({"ytick.color": "#888", "ytick.labelcolor": "#222"})
    return plt


def save_svg(figure: Any, file: Path) -> None:
    """Saves a picture without a background, whose text turns bright where pages are dark."""
    figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})
    dark = "@media(prefers-color-scheme:dark){text{fill:#ddd!important}}"
    text = file.read_text().replace("</style>", f"{dark}</style>", 1)
    file.write_text(re.sub(r" +$", "", text, flags=re.M))
