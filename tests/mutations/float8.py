"""Faults of float8 and of layers in two halves."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        name="filter-gets-a-transposed-shape",
        file="compiler/fp8/insert/choose_matmuls.py",
        old="weight_shape = (forward.shape[1], forward.inner)",
        new="weight_shape = (forward.inner, forward.shape[1])",
        fault="the fp8 filter is asked about [in, out] where a weight is [out, in]",
        tests=(
            "tests/fp8/test_numerics.py::test_sizes_that_do_not_divide_and_a_filter",
            "tests/fp8/test_insert.py::test_filter",
        ),
    ),
    Mutation(
        name="gradients-in-the-format-of-activations",
        file="compiler/fp8/insert/insert_casts.py",
        old="format = self._config.recipe.gradient_format if is_gradient else E4M3",
        new="format = E4M3",
        fault="gradients are cast to e4m3, whose range is too small",
        tests=("tests/fp8/test_numerics.py", "tests/fp8/test_delayed.py"),
    ),
    Mutation(
        name="sample-without-headroom",
        file="compiler/fp8/state/delayed_scaling.py",
        old="amax = sample.amax if sample.is_whole else e.call(aten.mul.Tensor, sample.amax, HEADROOM)",
        new="amax = sample.amax",
        fault="rows that were not sampled saturate in the first call",
        tests=("tests/fp8/test_fused_casts.py::test_first_call_of_many_rows",),
    ),
    Mutation(
        name="each-dim-is-sampled-alone",
        file="compiler/fp8/state/delayed_scaling.py",
        old="steps[dim], left = step, left // step",
        new="steps[dim] = step",
        fault="a sample of several dims has too few rows",
        tests=("tests/fp8/test_fused_casts.py::test_samples_count_rows_over_all_dims",),
    ),
    Mutation(
        name="lower-bound-of-a-cast-is-lost",
        file="compiler/fp8/cast_nodes.py",
        old="e.call(aten.clamp_min.default, wide, -largest), largest)",
        new="wide, largest)",
        fault="numbers below the range become NaN",
        tests=("tests/fp8/test_cast_nodes.py",),
    ),
    Mutation(
        name="missing-keys-are-called-unknown",
        file="runtime/fp8/amax_history/history.py",
        old="missing, unknown = existing - state.keys(), state.keys() - existing",
        new="unknown, missing = existing - state.keys(), state.keys() - existing",
        fault="an error about a loaded state says the opposite",
        tests=("tests/fp8/test_delayed.py::test_loading_is_strict",),
    ),
    Mutation(
        name="halves-are-joined-along-dim-0",
        file="compiler/tokens/in_halves.py",
        old="return torch.cat([one, other], dim)",
        new="return torch.cat([one, other])",
        fault="halves of a batch of one are joined as two sequences",
        tests=("tests/compiler/test_tokenwise.py::test_results_are_joined",),
    ),
    Mutation(
        name="choice-outlives-autocast",
        file="compiler/tokens/choose_halves.py",
        old="key = (_structure(layer), tokens, modes, options.key())",
        new="key = (_structure(layer), tokens, options.key())",
        fault="a layer's choice under autocast is used without it",
        tests=("tests/compiler/test_tokenwise.py::test_choices_of_other_calls", "tests/compiler/test_tokenwise.py"),
    ),
    Mutation(
        name="no-argument-may-hold-tokens",
        file="compiler/tokens/tokenwise.py",
        old="or isinstance(arguments, bool) or arguments < 1:",
        new="or isinstance(arguments, bool) or arguments < 0:",
        fault="tokenwise(layer, arguments=0) is accepted",
        tests=("tests/compiler/test_tokenwise.py::test_numbers_of_arguments",),
    ),
)
