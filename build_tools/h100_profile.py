"""Create the shipped profile of an H100 from stored calibrations: python build_tools/h100_profile.py [--check]

    docs/data/calibration_h100_tp2.json     a calibration of two H100s, as `calibrate` wrote it
    docs/data/calibration_h100_tp4.json     one of four: all_to_alls and fused collectives of 4 ranks
    compiler/cost/profiles/h200.json        other plain collectives, and direct stores, of 4 and 8 ranks
    compiler/cost/profiles/h100.json        the result

After another calibration: replace the first file or the second, revise OUTLIERS, run this again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
CALIBRATION = "docs/data/calibration_h100_tp2.json"
OF_FOUR = "docs/data/calibration_h100_tp4.json"
PROFILES = ROOT / "compiler" / "cost" / "profiles"

OUTLIERS: dict[str, list[list[Any]]] = {
    "matmuls": [
        ["nt", "float8", 1024, 4096, 4096, 141.62],
        ["nt", "bfloat16", 384, 4096, 512, 24.376],
        ["nt", "bfloat16", 768, 1024, 8192, 71.562],
    ],
    "direct": [["bfloat16", 2, 2048, 4096, 3584, 390.23]],
}
"""Measurements that are left out: each took 2.8 to 5.2 times as long as predicted from the others. No other one took 1.5 times
as long."""


def create_profile(calibration: Json, of_four: Json, base: Json) -> Json:
    """Return the profile as JSON values. `of_four`: a calibration of four H100s. `base`: the profile of an H200.

    The measurements of the calibration stay, without OUTLIERS. Group sizes that it lacks are those of `of_four`, or of `base`
    where that has them. The rate of memory, which this calibration did not set yet, is that of the largest measured reduction.
    """
    made: Json = json.loads(json.dumps(calibration))
    ranks = str(calibration["key"]["ranks"])
    size, us = calibration["reduce"][-1]
    made["compute"]["memory_gbs"] = float(f"{size / us / 1e3:.4g}")
    made["matmuls"] = _without(calibration["matmuls"], OUTLIERS["matmuls"])
    others = [row for row in base["direct"]["matmuls"] if str(row[1]) != ranks]
    made["direct"]["matmuls"] = _without(calibration["direct"]["matmuls"], OUTLIERS["direct"]) + others
    for kind, curves in base["collectives"].items():
        made["collectives"][kind] = {**curves, **calibration["collectives"][kind]}
    made["collectives"]["all_to_all"]["4"] = of_four["collectives"]["all_to_all"]["4"]
    for kind in made["fused"].keys() - {"source"}:
        made["fused"][kind]["4"] = of_four["fused"][kind]["4"]
    made["fused"]["source"] += f"; of 4 ranks: {of_four['fused']['source']}"
    sizes = " and ".join(str(r) for r in sorted({row[1] for row in others}))
    made["name"] = "h100"
    made["source"] = (
        f"measured on {ranks} x {calibration['key']['gpu']} ({calibration['source']}; {CALIBRATION}), except: "
        f"plain all_gather, reduce_scatter, all_reduce and direct of {sizes} ranks are those of the profile {base['name']}, "
        f"measured on H200s with as many multiprocessors and NVLinks; all_to_alls and fused collectives of 4 ranks are "
        f"measured on 4 H100s ({of_four['source'].partition(';')[0]}; {OF_FOUR}); compute.tiles, wave_us, gap_us and "
        f"network, which a calibration does not measure, are those of {base['name']} too; memory_gbs is the rate of the "
        f"largest measured reduction; left out as noise: "
        f"{_list(OUTLIERS['matmuls'])} of matmuls, {_list(OUTLIERS['direct'])} of direct"
    )
    made["holes"] = [
        f"plain all_gather, reduce_scatter and all_reduce of {sizes} ranks (from {base['name']})",
        f"direct of {sizes} ranks (from {base['name']})",
        *base["holes"],
    ]
    return made


def as_text(profile: Json) -> str:
    """Return the text of the file."""
    return json.dumps(profile, indent=1) + "\n"


def _without(rows: list[list[Any]], outliers: list[list[Any]]) -> list[list[Any]]:
    """Return `rows` without `outliers`. ValueError for an outlier that is not among them: the calibration is another one."""
    missing = [row for row in outliers if row not in rows]
    if missing:
        raise ValueError(f"{CALIBRATION}: no measurement {_list(missing)}; revise OUTLIERS in {Path(__file__).name}")
    return [row for row in rows if row not in outliers]


def _list(rows: list[list[Any]]) -> str:
    return ", ".join(f"[{', '.join(map(str, row))}]" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the profile, or compare it with --check. Return 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the profile differs")
    flags = parser.parse_args(argv)
    path = PROFILES / "h100.json"
    sources = (ROOT / CALIBRATION, ROOT / OF_FOUR, PROFILES / "h200.json")
    text = as_text(create_profile(*(json.loads(source.read_text()) for source in sources)))
    differs = not path.is_file() or path.read_text() != text
    if differs and not flags.check:
        path.write_text(text)
    print(f"{path.relative_to(ROOT)}: {'unchanged' if not differs else 'differs' if flags.check else 'written'}")
    return 1 if differs and flags.check else 0


if __name__ == "__main__":
    sys.exit(main())
