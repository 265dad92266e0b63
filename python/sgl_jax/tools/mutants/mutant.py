"""One mutation: an exact snippet of one file and what replaces it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class SnippetError(ValueError):
    """The snippet of a mutant no longer occurs exactly once: the catalogue must follow the code."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """``file`` is relative to the ``sgl_jax`` package; ``old`` must occur in it exactly once."""

    name: str
    file: str
    old: str
    new: str

    def occurrences(self, root: Path = PACKAGE_ROOT) -> int:
        path = root / self.file
        return path.read_text().count(self.old) if path.is_file() else 0

    def apply(self, root: Path) -> None:
        """Rewrite the file below ``root`` (a copy of the package). Raises SnippetError unless it fits exactly once."""
        found = self.occurrences(root)
        if found != 1:
            raise SnippetError(f"{self.name}: snippet occurs {found} times in {self.file}, expected once")
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))
