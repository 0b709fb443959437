"""The step of make that installs torch: no CUDA packages on a machine without an NVIDIA GPU."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "install_torch.py"
CPU = ["filelock", "sympy>=1.13"]
CUDA = [*CPU, "nvidia-cublas==13.1.0", "triton==3.6.0", "cuda-bindings>=13", "optree; extra == 'x'"]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, monkeypatch):
    """Run the script on an empty environment and return the pip commands that would have run."""

    def run(requires_dist: list[str], gpu: bool = False, **environment: str) -> list[str]:
        commands = []

        def pip(*arguments: str) -> None:
            commands.append(" ".join(arguments))
            if "--report" in arguments:
                report = {"install": [{"metadata": {"requires_dist": requires_dist}}]}
                Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))

        monkeypatch.setattr(script, "pip", pip)
        monkeypatch.setattr(script, "is_installed", lambda requirement: False)
        monkeypatch.setattr(script, "has_nvidia_gpu", lambda: gpu)
        for name in ("TORCH_INDEX", "CUDA"):
            monkeypatch.setenv(name, environment.get(name, ""))
        script.main("torch==2.13.0")
        return commands

    return run


def test_names_cuda_packages_that_apply_here(script):
    lines = [*CUDA, "nvidia-nccl; platform_system == 'Nowhere'", "nvidia-x; extra == 'opt'"]
    report = {"install": [{"metadata": {"requires_dist": lines}}, {"metadata": {}}]}
    assert script.cuda_packages(report) == ["cuda-bindings", "nvidia-cublas", "triton"]


def test_installs_a_cpu_build(run):
    assert run(CPU)[-1] == "install torch==2.13.0"


def test_refuses_a_cuda_build_in_one_sentence(run):
    with pytest.raises(SystemExit) as stop:
        run(CUDA)
    message = str(stop.value)
    assert "3 CUDA packages" in message and "TORCH_INDEX=" in message and "CUDA=1" in message
    assert "\n" not in message


@pytest.mark.parametrize("allowed_by", [{"gpu": True}, {"CUDA": "1"}], ids=["a GPU", "CUDA=1"])
def test_installs_a_cuda_build_where_it_is_wanted(run, allowed_by):
    assert run(CUDA, **allowed_by) == ["install torch==2.13.0"]


def test_takes_torch_alone_from_the_given_index(run):
    dry_run, install = run(CPU, TORCH_INDEX="file:///wheels")
    assert "--index-url file:///wheels torch==2.13.0" in dry_run
    assert install == "install --index-url file:///wheels torch==2.13.0"


def test_a_local_version_label_is_the_same_version(script, monkeypatch):
    monkeypatch.setattr(script.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert script.is_installed(script.Requirement("torch==2.13.0"))
    assert not script.is_installed(script.Requirement("torch==2.12.0"))
