"""Whether a path still leads where it did: others may have removed what lay there, or put something else in its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mark:
    """A file that lies at *path* now."""

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Mark:
        """Raises ``OSError`` where there is none."""
        found = path.lstat()
        return cls(path, found.st_dev, found.st_ino)

    @property
    def there(self) -> bool:
        """Whether it still does."""
        try:
            return Mark.of(self.path) == self
        except OSError:
            return False
