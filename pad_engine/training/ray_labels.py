"""The shards of one run over the machines of a Ray cluster, by Ray Data (`pip install 'pad-engine[ray]'`).

Ray places the shards, moves them off a machine that has died, and waits. A shard is what `pad label --shard` does, into
a file of its own in a folder that all machines see, so one that is begun again goes on from there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pad_engine.errors import RequestError


def run_shards(label_shard: Callable[[int], Path], shards: int, num_gpus: float) -> list[Path]:
    """Label shards 1 to `shards` on the cluster that is there, or on this machine alone; returns their files.

    label_shard: labels one and returns its file; it is sent to the machines, which need pad_engine and the models.
    num_gpus: of each shard while it runs.
    """
    try:
        import ray
    except ImportError as error:
        raise RequestError("ray is not installed", "pip install 'pad-engine[ray]'") from error

    def label(row: dict[str, Any]) -> dict[str, Any]:
        return {"path": str(label_shard(int(row["id"]) + 1))}

    # a block for each shard, or one worker would be given several
    rows = ray.data.range(shards, override_num_blocks=shards).map(label, num_gpus=num_gpus or None, num_cpus=1)
    return sorted(Path(row["path"]) for row in rows.take_all())
