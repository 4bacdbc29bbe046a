"""The import rules bite: a copy of app/ with one offending import fails lint-imports."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Lint = Callable[[], subprocess.CompletedProcess[str]]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what import-linter reads."""
    shutil.copytree(ROOT / "app", tmp_path / "app", ignore=shutil.ignore_patterns("builtin", "__pycache__"))
    (tmp_path / "scripts" / "support").mkdir(parents=True)
    support = ("scripts/support/__init__.py", "scripts/support/import_contracts.py")
    for name in ("scripts/__init__.py", *support, "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def lint(copy: Path) -> Lint:
    """Runs lint-imports over the copy."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return lambda: subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)


def test_the_source_keeps_the_contracts(lint: Lint) -> None:
    """app/ as it stands passes, all contracts."""
    result = lint()
    assert result.returncode == 0, result.stdout
    assert "9 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("app/core.py", "import app.settings", "app.core is not allowed to import app.settings"),
        (
            "app/stream/token_stream.py",
            "import app.pipeline.serve",
            "app.stream is not allowed to import app.pipeline",
        ),
        (
            "app/api/schema/chat_request.py",
            "import app.api.routes.endpoints",
            "app.api.schema is not allowed to import app.api.routes",
        ),
        ("app/intake/head.py", "import app.api.app", "app.intake is not allowed to import app.api"),
        ("app/engine/sink.py", "import app.runtime", "app.engine is not allowed to import app.runtime"),
        ("app/engine/sink.py", "import app.store.keys", "app.engine.sink -> app.store.keys"),
        (
            "app/runtime.py",
            "import app.api.schema.chat_request",
            "app.runtime is not allowed to import app.api",
        ),
        ("app/runtime.py", "def later():\n    import sglang", "app.runtime imports sglang"),
        (
            "app/engine/sink.py",
            "from sglang.srt import utils",
            "app.engine.sink imports sglang",
        ),
        ("app/engine/new.py", "import sgl_kernel", "app.engine.new imports sgl_kernel"),
        ("app/sglang_new.py", "import sglang", "app.sglang_new imports sglang"),
        ("app/api/console/new.py", "import sglang", "app.api.console.new imports sglang"),
    ],
)
def test_an_offending_import_fails(copy: Path, lint: Lint, path: str, line: str, complaint: str) -> None:
    """An import against the layers, or of SGLang outside app/engine/sglang/, is named and fails."""
    file = copy / path
    file.parent.mkdir(exist_ok=True)
    (file.parent / "__init__.py").touch()
    file.write_text((file.read_text() if file.exists() else "") + f"\n{line}\n")
    result = lint()
    assert result.returncode == 1
    assert complaint in result.stdout


def test_a_module_without_a_layer_fails(copy: Path, lint: Lint) -> None:
    """A new module of app/ has to be given its layer."""
    (copy / "app" / "newcomer.py").touch()
    result = lint()
    assert result.returncode == 1
    assert "newcomer" in result.stdout


def test_siblings_do_not_import_each_other(copy: Path, lint: Lint) -> None:
    """engine, safety and metering know nothing of each other."""
    for name in ("safety", "metering"):
        (copy / "app" / name).mkdir(exist_ok=True)
        (copy / "app" / name / "__init__.py").touch()
    (copy / "app" / "metering" / "new.py").write_text("import app.safety\n")
    result = lint()
    assert result.returncode == 1
    assert "app.metering is not allowed to import app.safety" in result.stdout


def test_a_new_sglang_module_may_import_sglang(copy: Path, lint: Lint) -> None:
    """app/engine/sglang/ is a pattern, not a list."""
    (copy / "app" / "engine" / "sglang" / "newcomer.py").write_text("import sglang\n")
    assert lint().returncode == 0
