"""A repository of the hub becomes a folder, which goes on where it was cut off: download.py REPOSITORY REVISION FOLDER.

One line and exit code 3 where the hub does not give it.
"""

import sys
from collections.abc import Sequence

import httpx
from huggingface_hub import snapshot_download


def main(words: Sequence[str]) -> int:
    repository, revision, folder = words
    try:
        snapshot_download(repository, revision=revision, local_dir=folder)
    except (OSError, httpx.HTTPError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        print(
            f"prepare.sh: {repository} cannot be downloaded: {reason}; the same command goes on from there",
            file=sys.stderr,
        )
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
