"""Makes ckpt/pool/_fingerprint_ptx.h anew from _fingerprint.cu, where nvcc is. usage: python tests/pool_ptx.py"""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

POOL = Path(__file__).parent.parent / "ckpt/pool"
SOURCE, HEADER = POOL / "_fingerprint.cu", POOL / "_fingerprint_ptx.h"
HEAD = """/* _fingerprint.cu as PTX, made by tests/pool_ptx.py from the source whose SHA-256 is {digest}.
 * Of PTX 7.0, which every driver since CUDA 11.0 takes, for compute capability 7.5 and newer. */
"""


def digest() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def main() -> None:
    made = subprocess.run(
        ["nvcc", "-ptx", "-arch=compute_75", "-O3", "-o", "/dev/stdout", SOURCE], check=True, capture_output=True, text=True
    ).stdout
    made = re.sub(r"^\.version .*", ".version 7.0", made, flags=re.MULTILINE)
    lines = [" ".join(line.split()) for line in made.splitlines()]
    lines = [line for line in lines if line and not line.startswith("//")]
    subprocess.run(["ptxas", "-arch=sm_90", "-o", "/dev/null", "/dev/stdin"], check=True, input="\n".join(lines), text=True)
    escaped = [line.replace('"', '\\"') for line in lines]
    text = "".join(f'    "{line}\\n"\n' for line in escaped)
    HEADER.write_text(HEAD.format(digest=digest()) + f"static const char fingerprint_ptx[] =\n{text.rstrip()};\n")


if __name__ == "__main__":
    main()
