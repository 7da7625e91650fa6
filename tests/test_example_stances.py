"""Examples compile nothing after their second step: their later steps run where a compilation is an error."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

EAGER = {"one_process"}
"""Functions of examples that train without a compiler, as references."""
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def step_loops(tree: ast.AST) -> list[ast.For]:
    """Return the outermost for loops of a file that update parameters: they, or functions that they call, call `.step`."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    updating, known = {"step"}, 0
    while known < len(updating):
        known = len(updating)
        updating |= {f.name for f in functions if _calls(f) & updating}
    eager = {n for f in functions if f.name in EAGER for n in ast.walk(f)}
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and n not in eager and _calls(n) & updating]
    inner = {n for loop in loops for n in ast.walk(loop) if n is not loop}
    return [loop for loop in loops if loop not in inner]


def _calls(tree: ast.AST) -> set[str]:
    called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in called if isinstance(f, ast.Attribute | ast.Name)}


def guards(loop: ast.For) -> list[ast.With]:
    """Return the contexts of a loop in which a compilation after the second step is an error."""
    contexts = [n for n in ast.walk(loop) if isinstance(n, ast.With)]
    return [c for c in contexts if any("fail_on_recompile" in ast.unparse(item) for item in c.items)]


def compiles(folder: Path) -> bool:
    return any(".compile(" in path.read_text() for path in folder.glob("*.py"))


def training_files() -> list[Path]:
    """Return the files of examples that compile a model and update its parameters in a loop."""
    files = [p for p in sorted(EXAMPLES.rglob("*.py")) if p.parent == EXAMPLES or compiles(p.parent)]
    return [p for p in files if step_loops(ast.parse(p.read_text()))]


def test_examples_that_train_are_found() -> None:
    found = {p.parent.name for p in training_files()}
    assert found >= {"context_parallel", "expert_parallel", "fsdp_tp", "layer", "llama_tp", "pipeline", "recovery"}


@pytest.mark.parametrize("path", training_files(), ids=lambda p: str(p.relative_to(EXAMPLES)))
def test_later_steps_may_not_compile(path: Path) -> None:
    """The context is around what runs forward and backward, so no loop that trains is without one."""
    for loop in step_loops(ast.parse(path.read_text())):
        found = guards(loop)
        assert found, f"{path.name}:{loop.lineno} trains without set_stance"
        trained = {name for guard in found for name in _calls(guard)}
        assert trained & {"backward", "step", "compute_gradients"}, f"{path.name}:{loop.lineno}: {sorted(trained)}"


def test_a_loop_without_a_stance_is_found() -> None:
    loop = "for step in range(3):\n    loss = compiled(x)\n    loss.backward()\n    optimizer.step()\n"
    (found,) = step_loops(ast.parse(loop))
    assert not guards(found)
    text = "def update(o):\n    o.step()\nfor step in range(3):\n    update(o)\n"
    assert len(step_loops(ast.parse(text))) == 1
