"""Data: what is on disk, captions as token ids, and noise."""

from pcsr_fast.data.folder import build_vocabulary, open_split
from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import Vocabulary

__all__ = ["Split", "Vocabulary", "build_vocabulary", "open_split"]
