"""What offline W&B runs hold, read back from the files that are synced later."""

import json
import struct
from time import perf_counter, sleep

BLOCK = 32768  # of LevelDB's log format, which offline files are in after seven bytes of their own


def chunks(data):
    """The records of an offline run's file, as bytes: each in pieces (checksum, length, kind, data), none across blocks."""
    at, parts = 7, []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # a block's end holds no header
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield b"".join(parts)
            parts = []


def records(folder, patience=60):
    """What the newest offline run's file holds when it is whole: another process writes its end shortly after `finish`."""
    until = perf_counter() + patience
    while "exit" not in (run := read_records(folder)) and perf_counter() < until:
        sleep(0.1)
    return run


def read_records(folder):
    """What an offline run's file holds now: lists of records by kind."""
    from wandb.proto import wandb_internal_pb2

    run = max((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime_ns)
    path = next(run.glob("run-*.wandb"), None)
    data, by_kind = b"" if path is None else path.read_bytes(), {}
    assert data[:4] in (b"", b":W&B")
    for chunk in chunks(data):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(chunk)
        kind = record.WhichOneof("record_type")
        by_kind.setdefault(kind, []).append(getattr(record, kind))
    return by_kind


def logged(run):
    """All that was logged or summed up, by key."""
    items = [
        item for name in ("history", "summary") for record in run.get(name, []) for item in getattr(record, "item", [])
    ]
    items += [item for record in run.get("summary", []) for item in record.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def inventory(folder):
    """The run of a folder, listed: how it is called, how it ended, and what was logged to it."""
    run = records(folder)
    about, values = run["run"][0], logged(run)
    kinds = {key.removesuffix("/_type"): value for key, value in values.items() if key.endswith("/_type")}
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and key[0] != "_"}
    return {
        "name": about.display_name,
        "group": about.run_group,
        "job_type": about.job_type,
        "tags": list(about.tags),
        "exit": run["exit"][0].exit_code,
        "scalars": {
            key: value for key, value in numbers.items() if not any(key.startswith(f"{kind}/") for kind in kinds)
        },
        "tables": sorted(key for key, kind in kinds.items() if kind == "table-file"),
        "images": sorted(key for key, kind in kinds.items() if kind == "image-file"),
        "charts": charts(run),
        "artifacts": sorted(one.name for one in run.get("artifact", []) if one.type not in ("run_table", "job")),
    }


def charts(run):
    """Custom charts of a run: key -> (preset, which column is which field)."""
    settings = [item for record in run.get("config", []) for item in record.update]
    shown = {item.nested_key[2]: json.loads(item.value_json) for item in settings if "visualize" in item.nested_key}
    configs = {key: one["panel_config"] for key, one in shown.items()}
    return {key: (config["panelDefId"], config["fieldSettings"]) for key, config in configs.items()}


def table(folder, key):
    """Columns and rows of a logged table."""
    (path,) = (folder / "wandb").glob(f"offline-run-*/files/media/table/{key}_*.json")
    held = json.loads(path.read_text())
    return held["columns"], held["data"]
