"""Install one pinned torch where this runs, never CUDA packages without an NVIDIA GPU.

Usage: python install_torch.py torch==VERSION  (`make` runs it with the python of .venv)

Environment:
    TORCH_INDEX: a package index to take torch from, e.g. PyTorch's own index of CPU wheels.
    CUDA: set to 1 to install CUDA packages on a machine without a working nvidia-smi.

On Linux the default index serves torch with several GB of CUDA packages. Which packages a wheel
asks for stands in its metadata, so one dry run (a few seconds) tells before anything is downloaded.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version

# The first pip that reads a wheel's metadata without downloading the wheel.
OLDEST_PIP = Version("23.2")
CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")


def pip(*arguments: str) -> None:
    """Run pip of this environment; on failure exit with pip's status, its message already shown."""
    status = subprocess.run([sys.executable, "-m", "pip", *arguments]).returncode
    if status:
        sys.exit(status)


def cuda_packages(report: dict) -> list[str]:
    """Return the CUDA packages that the wheels in a pip installation report ask for here.

    Args:
        report: pip's `--report` as a dictionary. Requirements whose marker excludes this machine
            are left out.
    """
    requirements = [
        Requirement(line)
        for item in report["install"]
        for line in item["metadata"].get("requires_dist", [])
    ]
    return sorted(
        requirement.name
        for requirement in requirements
        if requirement.name.startswith(CUDA_PREFIXES)
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    )


def has_nvidia_gpu() -> bool:
    """Return whether nvidia-smi runs and lists at least one GPU."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def refuse_cuda_packages(requirement: str, index: list[str]) -> None:
    """Exit with one sentence where `requirement` would bring CUDA packages along."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip("install", "-q", "--dry-run", "--no-deps", "--report", str(report), *index, requirement)
        packages = cuda_packages(json.loads(report.read_text(encoding="utf-8")))
    if packages:
        sys.exit(
            f"No NVIDIA GPU was found, but {requirement} from this package index would download "
            f"{len(packages)} CUDA packages, several GB ({', '.join(packages[:3])}, ...): run make "
            "again with TORCH_INDEX=<the CPU wheel index that pytorch.org's install page names>, "
            "or with CUDA=1 to download them all the same."
        )


def is_installed(requirement: Requirement) -> bool:
    """Return whether a version that `requirement` allows is installed; 2.13.0+cpu is 2.13.0."""
    try:
        present = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(present, prereleases=True)


def main(requirement: str) -> None:
    """Install `requirement` (torch==VERSION) unless it is there already."""
    if is_installed(Requirement(requirement)):
        return
    if Version(importlib.metadata.version("pip")) < OLDEST_PIP:
        pip("install", "-q", "--upgrade", "pip")
    torch_index = os.environ.get("TORCH_INDEX")
    # An index of torch wheels also holds what torch depends on, so it can stand alone.
    index = ["--index-url", torch_index] if torch_index else []
    if not has_nvidia_gpu() and os.environ.get("CUDA") != "1":
        refuse_cuda_packages(requirement, index)
    pip("install", *index, requirement)


if __name__ == "__main__":
    main(sys.argv[1])
