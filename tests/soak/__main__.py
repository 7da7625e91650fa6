"""python -m tests.soak calls | programs | faults | pipeline: soaks and the fault matrix, on CPU ranks, bounded by flags.

    python -m tests.soak calls --ranks 4 --seconds 3600 --seed 7
    python -m tests.soak calls --ranks 4 --seed 7 --first 5312 -n 1        one call of it again
    python -m tests.soak programs --ranks 2 --seconds 600 --only FSDP2     training steps of whole programs
    python -m tests.soak pipeline --ranks 4 --seconds 600                  schedules whose ranks are late at random
    python -m tests.soak faults --ranks 3 --deadline 3 --only 'grows|binds'

Exit code 0: no error was found. 1: errors, listed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time

import tests.harness.shared_memory  # noqa: F401  (tags the segments of this process and of all that it starts)


def _calls(options: argparse.Namespace) -> int:
    from .soak import soak

    seconds = 60.0 if options.seconds is None and options.calls is None else options.seconds
    report = soak(
        options.ranks, options.seed, seconds=seconds, calls=options.calls, first=options.first,
        progress=lambda text: print(text, end="\r", file=sys.stderr, flush=True),
    )  # fmt: skip
    print(report.describe())
    return 0 if report.is_fine else 1


def _programs(options: argparse.Namespace) -> int:
    from .soak import soak
    from .steps import PROGRAMS, RANKS

    wrong = 0
    for name in (name for name in PROGRAMS if re.search(options.only, name)):
        ranks, seconds = RANKS.get(name, options.ranks), None if options.calls else options.seconds
        report = soak(ranks, options.seed, program=name, seconds=seconds, calls=options.calls, first=options.first)
        print(report.describe(), flush=True)
        wrong += not report.is_fine
    return 1 if wrong else 0


def _faults(options: argparse.Namespace) -> int:
    from tests.harness.shared_memory import list_segments

    from .fault_matrix import list_faults, play

    faults = [fault for fault in list_faults("cpu", options.quick) if re.search(options.only, fault.name)]
    victims = range(options.ranks) if options.victim is None else [options.victim]
    begin, failed, tried = time.monotonic(), 0, 0
    for victim in victims:
        for fault in faults:
            if options.seconds is not None and time.monotonic() - begin > options.seconds:
                break
            before = list_segments()
            wrong, measured = play(fault, "cpu", options.ranks, options.deadline, victim, options.spare)
            if left := sorted(list_segments() - before):
                wrong = "; ".join(filter(None, [wrong, f"left behind: {', '.join(left)}"]))
            tried, failed = tried + 1, failed + bool(wrong)
            print(
                f"{'FAIL' if wrong else 'ok':<4} rank {victim} of {options.ranks}  {fault.name:<28} {wrong or measured}",
                flush=True,
            )
    print(f"{tried} trials of {len(faults) * len(victims)}, {failed} failed")
    return 1 if failed else 0


def _pipeline(options: argparse.Namespace) -> int:
    from tests.harness.ranks import RankPool
    from tests.runtime.rank_stage import delayed_steps

    begin, seed, wrong = time.monotonic(), options.seed, 0
    with RankPool(options.ranks) as pool:
        while time.monotonic() - begin < options.seconds:
            found = [text for rank in pool.run(delayed_steps, seed, 10, timeout=300) for text in rank]
            print(f"seed {seed}: {'; '.join(found) or 'ok'}", flush=True)
            seed, wrong = seed + 1, wrong + bool(found)
    print(f"{seed - options.seed} runs, {wrong} wrong")
    return 1 if wrong else 0


def main() -> int:
    """Parse the command line and run one of the programs."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="calls | programs | faults | pipeline")
    calls = commands.add_parser("calls", help="random calls, compared with fp64; resources stay flat")
    calls.set_defaults(run=_calls)
    calls.add_argument("--seconds", type=float, help="run so long (default 60, where -n is not given)")
    programs = commands.add_parser("programs", help="training steps of whole programs, compared with fp64; resources stay flat")
    programs.set_defaults(run=_programs)
    programs.add_argument("--seconds", type=float, default=60.0, help="run each so long, where -n is not given")
    programs.add_argument("--only", default="", help="regular expression on names of programs")
    for command in (calls, programs):
        command.add_argument("-n", "--calls", type=int, help="run so many calls, or steps")
        command.add_argument("--first", type=int, default=0, help="number of the first one")
        command.add_argument("--seed", type=int, default=0)
    faults = commands.add_parser("faults", help="one rank fails; the others must say so in time")
    faults.set_defaults(run=_faults)
    faults.add_argument("--seconds", type=float, help="start no trial after so many seconds")
    faults.add_argument("--deadline", type=float, default=3.0, help="step deadline of the ranks in seconds")
    faults.add_argument("--spare", type=float, default=1.5, help="seconds that a busy machine may add to twice the deadline")
    faults.add_argument("--victim", type=int, help="the rank that fails (default: each in turn)")
    faults.add_argument("--only", default="", help="regular expression on names of faults")
    faults.add_argument("--quick", action="store_true", help="fewer ops")
    pipeline = commands.add_parser("pipeline", help="schedules whose ranks are late at random, compared with a step in time")
    pipeline.set_defaults(run=_pipeline)
    pipeline.add_argument("--seconds", type=float, default=60.0, help="start no run after so many seconds")
    pipeline.add_argument("--seed", type=int, default=0)
    for command in (calls, programs, faults, pipeline):
        command.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
