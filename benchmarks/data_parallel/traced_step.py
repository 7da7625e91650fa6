"""A variant whose whole step is one graph, traced by make_fx: forward, then backward, whose gradients are outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ub_overlap
from ub_overlap import _torch_compat as compat

from ..parallel.variant import ParallelVariant


@dataclass
class TracedStep(ParallelVariant):
    """`call`: parameters, input, gradient of the output -> output, gradients of the parameters and of the input."""

    has_forward: ClassVar[bool] = False

    inputs: list[Tensor] = field(default_factory=list)
    compiler: str = "inductor"
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, model: nn.Module, x: Tensor, grad: Tensor, compiler: str, options: dict[str, Any]) -> TracedStep:
        """Return the variant, which its first step traces. `compiler`: as of ParallelContext. `options`: of our passes."""
        inputs = [*(p.detach() for p in model.parameters()), x.detach(), grad]
        return cls(name, model, None, x.requires_grad_(), grad, inputs=inputs, compiler=compiler, options=options)

    def _compile(self) -> Any:
        """Trace the step, and compile it unless the compiler is "aot_eager": with our passes if the name ends with "_ours"."""
        names = [name for name, _ in self.model.named_parameters()]

        def step(*flat: Tensor) -> list[Tensor]:
            leaves = [t.detach().requires_grad_() for t in flat[:-1]]
            with compat.reparametrize_module(self.model, dict(zip(names, leaves, strict=False))):
                out = self.model(leaves[-1])
            return [out.detach(), *torch.autograd.grad(out, leaves, flat[-1])]

        with torch.enable_grad():
            traced = make_fx(step, tracing_mode="fake")(*self.inputs)
        patches: dict[str, Any] = {}
        if self.name.endswith("_ours"):
            ub_overlap.apply_passes(traced, self.inputs, parameters=range(len(names)), options=self.options)
            patches = {"config_patches": ub_overlap.passes()}
        return compat.compile_fx(traced, self.inputs, **patches) if self.compiler == "inductor" else traced

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        """Return the output, and the gradients of the parameters and of the input."""
        self.call = self.call or self._compile()
        return list(self.call(*self.inputs))

    @torch.no_grad()
    def step(self) -> None:
        """Run forward and backward; gradients accumulate."""
        leaves, gradients = [*self.model.parameters(), self.x], self.run()[1:]
        if any(leaf.grad is None for leaf in leaves):
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
        else:
            torch._foreach_add_([leaf.grad for leaf in leaves], gradients)  # type: ignore[arg-type]

    def results(self) -> dict[str, Tensor]:
        """Return output and gradients of one step."""
        names = ["output", *(name for name, _ in self.model.named_parameters()), "input"]
        return {name: value.clone() for name, value in zip(names, self.run(), strict=True)}
