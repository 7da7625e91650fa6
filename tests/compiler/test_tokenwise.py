"""ub_overlap.tokenwise in one process: results of both halves joined, where layers stay whole, choices, copies and errors."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ub_overlap
from tests.compiler.rank_tokenwise import FORCE
from tests.harness.tiers import full_but
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.tokens import choose_halves
from ub_overlap.compiler.tokens.token_split import TokenSplit
from ub_overlap.runtime.errors import OptionError, UbOverlapError

pytestmark = pytest.mark.tier("test")

AUTO: dict[str, Any] = {"inner": "aot_eager", "profile": "h200", "min_bytes": 0}
WIDTH = 8


class Named(NamedTuple):
    tokens: Tensor
    logits: Tensor


class Layer(nn.Module):
    """[..., D] -> what `form` says. `seen`: the shapes that its forward was called with."""

    def __init__(self, form: str = "tokens", seen: list[tuple[int, ...]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.gate = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.form, self.seen = form, [] if seen is None else seen
        self.calls = 0
        self.total = torch.zeros(())

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Any:
        self.seen.append(tuple(x.shape))
        tokens = self.down(torch.relu(self.up(x))) * factor
        if self.form == "state":
            self.calls += 1
            self.total = self.total + tokens.detach().sum()
        elif self.form == "branch" and tokens.sum().item() > 0:
            tokens = tokens * 2
        flat = self.gate(x.reshape(-1, WIDTH))
        forms = {
            "pair": lambda: (tokens, flat),
            "dict": lambda: {"tokens": tokens, "more": [flat, self.gate(x)], "none": None},
            "named": lambda: Named(tokens, flat),
            "number": lambda: (tokens, x.shape[0]),
            "loss": lambda: tokens.sum(),
            "pair with a loss": lambda: (tokens, tokens.sum()),
        }
        return forms.get(self.form, lambda: tokens)()


def run(layer: Any, *inputs: Any) -> tuple[Any, list[Tensor]]:
    """Return the results, and the gradients of the first input and the parameters."""
    leaf = inputs[0].clone().requires_grad_()
    result = layer(leaf, *inputs[1:])
    loss = sum(t.square().sum() for t in tree_leaves(result) if isinstance(t, Tensor))
    return result, list(torch.autograd.grad(loss, [leaf, *layer.parameters()], allow_unused=True, materialize_grads=True))


def compiled(layer: nn.Module, options: dict[str, Any] = FORCE, **arguments: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(layer, backend="ub_overlap", options=options, **{"fullgraph": True, **arguments})


def is_close(a: Any, b: Any) -> bool:
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    tensors = all(x.shape == y.shape and torch.allclose(x, y, atol=1e-5) for x, y in pairs if isinstance(x, Tensor))
    return tensors and all(x == y for x, y in pairs if not isinstance(x, Tensor))


def choice() -> TokenSplit:
    """Return the last choice for the layer that `compiled` compiles."""
    (found,) = [c for c in HISTORY.token_splits() if c.layer == "L['self']"]
    return found


def halves(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes of the two halves."""
    dim = next(d for d, n in enumerate(shape) if n > 1)
    n = shape[dim]
    return [(*shape[:dim], part, *shape[dim + 1 :]) for part in (n // 2, n - n // 2)]


SHAPES = [(6, WIDTH), (7, WIDTH), (1, 5, WIDTH), (2, 3, WIDTH), (3, 5, WIDTH)]


@pytest.mark.parametrize("form", full_but(["dict"], ["tokens", "pair", "dict"]))
def test_results_are_joined(form: str) -> None:
    """In the order of the tokens, also rows of all tokens next to [B, S, D], with gradients."""
    for shape in SHAPES:
        layer = ub_overlap.tokenwise(Layer(form))
        x = torch.randn(shape)
        truth, seen = run(layer, x), list(layer.seen)
        layer.seen.clear()
        found = run(compiled(layer), x)
        assert seen == [shape] and layer.seen == halves(shape)
        assert is_close(found, truth) and type(found[0]) is type(truth[0]), shape


def test_a_named_tuple_stays_one() -> None:
    layer = ub_overlap.tokenwise(Layer("named"))
    assert isinstance(compiled(layer)(torch.randn(6, WIDTH)), Named)


def test_a_number_is_not_that_of_a_half() -> None:
    """It is no result that can be joined: an error, or the number of all tokens."""
    function, number = compiled(ub_overlap.tokenwise(Layer("number")), fullgraph=False), 6
    with contextlib.suppress(UbOverlapError):
        number = function(torch.randn(6, WIDTH))[1]
    assert number == 6


def test_dynamic_sizes() -> None:
    """One graph for many numbers of tokens; one token and none are not cut."""
    layer = ub_overlap.tokenwise(Layer())
    function = compiled(layer, dynamic=True)
    for tokens, cut in ((7, (3, 4)), (12, (6, 6)), (1, (1,)), (0, (0,))):
        x = torch.randn(tokens, WIDTH)
        layer.seen.clear()
        found = function(x)
        assert layer.seen == [(n, WIDTH) for n in cut]
        assert is_close(found, layer(x))


def test_without_gradients() -> None:
    layer, x = ub_overlap.tokenwise(Layer("pair")), torch.randn(2, 3, WIDTH)
    function = compiled(layer)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            layer.seen.clear()
            found = function(x)
            assert layer.seen == halves((2, 3, WIDTH)) and is_close(found, layer(x))


@pytest.mark.parametrize(("arguments", "factor"), [(2, (6, 1)), (1, (1, 1))])
def test_further_arguments(arguments: int, factor: tuple[int, ...]) -> None:
    """Those that hold tokens are cut, others are for all tokens."""
    layer, x, more = ub_overlap.tokenwise(Layer(), arguments), torch.randn(6, WIDTH), torch.randn(factor)
    truth = run(layer, x, more)
    layer.seen.clear()
    assert is_close(run(compiled(layer), x, more), truth) and layer.seen == halves((6, WIDTH))


def test_in_the_middle_of_a_model() -> None:
    """Layers of a model, one of them not declared, and a layer within a layer."""
    seen: list[tuple[int, ...]] = []
    model = nn.Sequential(ub_overlap.tokenwise(Layer(seen=seen)), nn.ReLU(), Layer(seen=seen))
    x = torch.randn(8, WIDTH)
    truth = run(model, x)
    for expected in ([4, 4, 8], [2, 2, 4, 2, 2, 4]):
        seen.clear()
        assert is_close(run(compiled(model), x), truth)
        assert [shape[0] for shape in seen] == expected
        ub_overlap.tokenwise(model)


# --- where it stays whole -----------------------------------------------------------------------------------------------


class Product(nn.Module):
    """A layer for which Inductor compiles no kernel, while it is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.randn(WIDTH, WIDTH)), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return x @ self.weight


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_other_backends(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Nothing is chosen."""
    monkeypatch.setattr(choose_halves, "_choose", None)  # a call fails
    torch._dynamo.reset()
    layer, x = ub_overlap.tokenwise(Product()), torch.randn(6, WIDTH)
    found = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert torch.allclose(found, x @ layer.weight, atol=1e-6) and layer.seen == [(6, WIDTH)]


def test_uncompiled() -> None:
    layer = ub_overlap.tokenwise(Layer())
    layer(torch.randn(6, WIDTH))
    assert layer.seen == [(6, WIDTH)]


@pytest.mark.parametrize(
    ("options", "tokens", "reason"),
    [
        ({"split_tokens": "off"}, 6, "split_tokens='off'"),
        ({**FORCE, "overlap": "off"}, 6, "overlap='off'"),
        (FORCE, 1, "it has one token"),
        ({"min_bytes": 0}, 6, "predicted times do not decide with these options on this device"),
        ({**AUTO, "overlap": "force"}, 6, "predicted times do not decide with these options on this device"),
        ({**AUTO, "split": "off"}, 6, "predicted times do not decide with these options on this device"),
    ],
)
def test_options(options: dict[str, Any], tokens: int, reason: str) -> None:
    layer = ub_overlap.tokenwise(Layer())
    compiled(layer, {"inner": "aot_eager", **options})(torch.randn(tokens, WIDTH))
    assert layer.seen == [(tokens, WIDTH)]
    found = choice()
    assert (found.dim, found.sizes, found.whole_us, found.reason) == (-1, (tokens, WIDTH), None, reason)


def test_tokens_by_keyword() -> None:
    """They are no positional argument."""
    layer = ub_overlap.tokenwise(Layer())
    compiled(layer)(x=torch.randn(6, WIDTH))
    assert layer.seen == [(6, WIDTH)]


@pytest.mark.parametrize("options", [FORCE, AUTO])
def test_tokens_without_a_number(options: dict[str, Any]) -> None:
    """Their number is known at run time only."""
    layer, x = ub_overlap.tokenwise(Layer()), torch.randn(9, WIDTH)
    rows = int((x[:, 0] > 0).sum())
    with compat.dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        function = torch.compile(lambda x: layer(x[x[:, 0] > 0]), backend="ub_overlap", options=options, fullgraph=True)
        found = function(x)
    assert layer.seen == [(rows, WIDTH)] and is_close(found, layer(x[x[:, 0] > 0]))


def test_overlap_force() -> None:
    """It forces sites, and does not forbid halves."""
    layer = ub_overlap.tokenwise(Layer())
    compiled(layer, {**FORCE, "overlap": "force"})(torch.randn(6, WIDTH))
    assert layer.seen == halves((6, WIDTH))


def test_auto_without_exchanges() -> None:
    """Halves have nothing to hide, and cost more. The choice and its times are recorded, and are in the report."""
    layer = ub_overlap.tokenwise(Layer())
    report = ub_overlap.explain(layer, AUTO)(torch.randn(6, WIDTH))
    found = choice()
    assert found in report.token_splits and found.dim == -1 and found.sizes == (6, WIDTH)
    assert found.whole_us is not None and found.halves_us is not None and 0 < found.whole_us < found.halves_us
    assert f"whole of tokens [6x8]; predicted us: whole {found.whole_us:.0f}, halves {found.halves_us:.0f}" in str(report)
    assert found.to_dict() in report.to_dict()["token_splits"]


def test_explain() -> None:
    """It wraps the backend, and cuts as the backend does."""
    layer = ub_overlap.tokenwise(Layer())
    report = ub_overlap.explain(layer, FORCE)(torch.randn(6, WIDTH))
    assert layer.seen == halves((6, WIDTH))
    assert choice() in report.token_splits and choice().dim == 0 and "two halves along dim 0 of tokens [6x8]" in str(report)


def test_a_layer_that_cannot_be_traced_alone() -> None:
    """It reads a value of its data. With "auto" it stays whole, with the reason."""
    layer, x = ub_overlap.tokenwise(Layer("branch")), torch.randn(6, WIDTH)
    assert is_close(compiled(layer, AUTO, fullgraph=False)(x), layer(x))
    found = choice()
    assert found.dim == -1 and found.reason.startswith("it cannot be traced alone: GuardOnDataDependentSymNode: ")


def test_tracing_leaves_a_layer_as_it_was() -> None:
    """What a layer writes to itself is that of its calls."""
    layer = ub_overlap.tokenwise(Layer("state"))
    plain, x = copy.deepcopy(layer), torch.randn(6, WIDTH)
    assert is_close(compiled(layer, AUTO)(x), plain(x))
    assert (layer.calls, layer.seen) == (1, [(6, WIDTH)])
    assert torch.allclose(layer.total, plain.total)


@dataclass
class Settings:
    top: int
    group: Any = None


class Group(dist.ProcessGroup):
    """A group that nothing is exchanged in."""

    def __init__(self, name: str) -> None:
        super().__init__(0, 2)
        self.name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.name


def choose_both(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[bool]:
    """Return for two layers whether each is traced, in both forms. They differ in one setting."""
    traced: list[Any] = []
    original = choose_halves.trace_layer
    monkeypatch.setattr(choose_halves, "trace_layer", lambda *args: (traced.append(args), original(*args))[1])
    monkeypatch.setattr(choose_halves, "_CHOSEN", {})
    found = []
    for values in zip(*settings.values(), strict=True):
        layer, before = ub_overlap.tokenwise(Layer()), len(traced)
        for name, value in zip(settings, values, strict=True):
            setattr(layer, name, value)
        layer(torch.randn(6, WIDTH))  # `seen` has another length: no setting
        compiled(layer, AUTO)(torch.randn(6, WIDTH))
        assert len(traced) - before in (0, 2)
        found.append(len(traced) > before)
    return found


@pytest.mark.tier("full")
def test_choices_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each structure: the modules' classes, settings and groups, and the parameters."""
    assert choose_both(monkeypatch, top=(2, 2)) == [True, False]
    assert choose_both(monkeypatch, top=(2, 4)) == [True, True]
    groups = [Group(name) for name in ("a", "a", "b")]
    assert choose_both(monkeypatch, group=groups) == [True, False, True]
    assert choose_both(monkeypatch, up=(nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16, bias=False))) == [True, True]


def test_choices_of_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, gradients and options are other choices."""
    monkeypatch.setattr(choose_halves, "_CHOSEN", {})
    layer, chosen = ub_overlap.tokenwise(Layer()), []
    for tokens, gradients, more in ((6, True, {}), (8, True, {}), (6, False, {}), (6, True, {"min_bytes": 1}), (6, True, {})):
        with torch.set_grad_enabled(gradients):
            compiled(layer, {**AUTO, **more}, dynamic=False)(torch.randn(tokens, WIDTH))
        chosen.append(len(choose_halves._CHOSEN))
    assert chosen == [1, 2, 3, 4, 4]
    assert choice().whole_us == next(iter(choose_halves._CHOSEN.values())).whole_us


@pytest.mark.tier("full")
@pytest.mark.parametrize("other", [Settings(4), Settings(2, Group("b"))], ids=["top", "group"])
def test_settings_in_dataclasses(monkeypatch: pytest.MonkeyPatch, other: Settings) -> None:
    same = Settings(2, Group("a")) if other.group else Settings(2)
    assert choose_both(monkeypatch, settings=(same, other)) == [True, True]


# --- copies and errors --------------------------------------------------------------------------------------------------


def test_copies() -> None:
    """A copy is declared as well, and states go from plain layers to declared ones."""
    plain = Layer()
    layer = ub_overlap.tokenwise(Layer(), arguments=2)
    assert isinstance(layer, Layer) and type(layer).__name__ == "Layer" and repr(layer) == repr(plain)
    again = ub_overlap.tokenwise(copy.deepcopy(layer), arguments=2)
    assert type(again) is type(layer)
    x = torch.randn(6, WIDTH), torch.randn(6, 1)
    with torch.no_grad():
        for p in again.parameters():
            p.mul_(2.0)
    buffer = io.BytesIO()
    torch.save(again.state_dict(), buffer)
    buffer.seek(0)
    plain.load_state_dict(torch.load(buffer))
    again.seen.clear()
    assert is_close(compiled(again)(*x), plain(*x)) and again.seen == halves((6, WIDTH))
    assert not is_close(layer(*x), plain(*x))


def test_twice() -> None:
    layer = ub_overlap.tokenwise(Layer())
    cls = type(layer)
    assert ub_overlap.tokenwise(layer) is layer and type(layer) is cls and cls.__mro__[1] is Layer
    assert type(ub_overlap.tokenwise(Layer())) is cls and type(Layer()) is Layer
    compiled(layer)(torch.randn(6, WIDTH))
    assert layer.seen == halves((6, WIDTH))


def test_pickle() -> None:
    """As torch.save of a whole model does."""
    layer, x = ub_overlap.tokenwise(Layer()), torch.randn(6, WIDTH)
    again = pickle.loads(pickle.dumps(layer))
    assert isinstance(again, Layer) and torch.equal(again(x), layer(x))


@pytest.mark.parametrize(
    "layer", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict(), nn.ParameterList(), nn.Linear, torch.relu, None]
)
def test_what_is_no_layer(layer: Any) -> None:
    with pytest.raises(OptionError, match="takes a layer that is called"):
        ub_overlap.tokenwise(layer)


def test_what_is_compiled_already() -> None:
    with pytest.raises(OptionError, match="takes a layer that is called"):
        ub_overlap.tokenwise(torch.compile(nn.Linear(2, 2)))


def test_a_sequential_is_a_layer() -> None:
    model = ub_overlap.tokenwise(nn.Sequential(Layer()))
    compiled(model)(torch.randn(6, WIDTH))
    assert model[0].seen == halves((6, WIDTH))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_script_is_no_layer() -> None:
    with pytest.raises(OptionError, match="takes a layer that is called"):
        ub_overlap.tokenwise(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.parametrize("arguments", [0, -1, "2"])
def test_numbers_of_arguments(arguments: Any) -> None:
    with pytest.raises(OptionError, match="arguments"):
        ub_overlap.tokenwise(Layer(), arguments)


@pytest.mark.parametrize("form", ["loss", "pair with a loss"])
def test_a_result_without_tokens(form: str) -> None:
    """The sum over a half is no sum over all. Without fullgraph Dynamo leaves the layer uncompiled, so it is whole."""
    layer, x = ub_overlap.tokenwise(Layer(form)), torch.randn(6, WIDTH)
    found, expected = compiled(layer, fullgraph=False)(x), layer(x)
    assert compat.tree_leaves(found)[-1].item() == pytest.approx(compat.tree_leaves(expected)[-1].item(), rel=1e-5)


def test_a_result_without_tokens_in_one_graph() -> None:
    with pytest.raises(Exception, match="a result of a tokenwise layer has no dim of tokens"):
        compiled(ub_overlap.tokenwise(Layer("loss")))(torch.randn(6, WIDTH))


def test_auto_with_a_result_without_tokens() -> None:
    """Such a layer is never cut."""
    layer = ub_overlap.tokenwise(Layer("loss"))
    compiled(layer, AUTO)(torch.randn(6, WIDTH))
    found = choice()
    assert found.dim == -1 and "a result of a tokenwise layer has no dim of tokens" in found.reason
