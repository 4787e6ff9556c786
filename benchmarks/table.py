"""The README's table, from what benchmarks/allreduce.py --json has written.

python benchmarks/table.py benchmarks/results/allreduce-2.json benchmarks/results/allreduce-4.json
"""

from __future__ import annotations

import argparse
import json

from allreduce import human


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="one per number of ranks")
    results = []
    for name in parser.parse_args().files:
        with open(name) as file:
            results.append(json.load(file))
    ranks = [result["ranks"] for result in results]
    heads = [f"{n} ranks: hororing | MPI takes | gloo takes" for n in ranks]
    print("| float32 sum, in place |", " | ".join(heads), "|")
    print("|---:|" + "---:|---:|---:|" * len(ranks))
    for size in results[0]["sizes"]:
        cells = []
        for result in results:
            figures = result["sizes"][size]
            ours = figures["hororing"]["median_us"]
            cells.append(f"{ours:,.0f} us" if ours >= 10 else f"{ours:.1f} us")
            for peer in ("mpi", "gloo"):
                cells.append(f"{figures[peer]['median_us'] / ours:.1f}x")
        print(f"| {human(int(size))} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
