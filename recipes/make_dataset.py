"""Writes a JSONL file as a Hugging Face dataset folder: make_dataset.py ROWS.jsonl FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset


def main(rows_file: Path, folder: Path) -> None:
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    Dataset.from_list(rows).save_to_disk(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
