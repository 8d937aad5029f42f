"""The command ``qkv calibrate``: it parses, calls, prints, and writes the scales."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption
from qkv.cli.run import Run
from qkv_eval.options import SeenTextOption, WindowOption


def calibrate(
    output: Annotated[str, typer.Option("--output", "-o", help="the file for the scales", metavar="FILE")],
    format: Annotated[str, typer.Option("--format", "-f", help="int8, fp8_e4m3 or fp8_e5m2")] = "int8",
    method: Annotated[
        str, typer.Option("--method", help="what sets a scale: maximum, percentile, or error (the least squared)")
    ] = "maximum",
    percentile: Annotated[
        float, typer.Option("--percentile", help="with --method percentile: per cent of the numbers that fit")
    ] = 99.9,
    equalize: Annotated[bool, typer.Option("--equalize", help="also vectors that make channels of keys alike")] = False,
    head_room: Annotated[
        float, typer.Option("--head-room", help="room for other texts in the range of equalized keys, a factor")
    ] = 1.5,
    sink_tokens: Annotated[
        int, typer.Option("--sink-tokens", min=0, help="first tokens that the cache will keep exact: they do not count")
    ] = 0,
    text: SeenTextOption = None,
    window: WindowOption = 2048,
    limit: Annotated[int, typer.Option("--limit", min=0, help="windows to run over; 0: all")] = 8,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Find static scales per head on a text, and write them to a file for QKVCache(scales=...)."""
    run = Run(json, seed, threads)
    _check_output(Path(output))

    from qkv.scales import save_scales
    from qkv_eval import calibrate as calibration
    from qkv_eval.text import load_text

    settings = calibration.CalibrateSettings(
        format, method, percentile, text, window, limit or None, equalize, head_room, sink_tokens
    )
    calibration.check_settings(settings)  # what is wrong shows now, not after the model is loaded
    load_text(text)
    loaded = run.load_model(model, dtype)
    with run.progress:
        results = calibration.run(*loaded, settings, run.progress)
    save_scales(output, results["scales"], loaded[0].config, format, results["about"])
    rows, about, seen = results["rows"], results["about"], results["text"]
    run.table(
        f"{format}, {about['method']}, {model}, {dtype}: {seen['name']}, {seen['windows']} x {window} tokens",
        {
            "layer": "layer|d",
            "heads": "heads|d",
            "key_largest": "keys:\nlargest|.4g",
            "key_scales": "\nscales",
            "key_range": "\nrange|.3f",
            "value_largest": "values:\nlargest|.4g",
            "value_scales": "\nscales",
            "value_range": "\nrange|.3f",
        },
        [_summary([row for row in rows if row["layer"] == layer]) for layer in dict.fromkeys(r["layer"] for r in rows)],
        "Over the heads: largest magnitude, least and largest scale, least range.\n"
        "Range: what can be stored, as a part of the head's largest magnitude."
        + ("\nKeys: as they are equalized." if equalize else ""),
    )
    for note in results["notes"]:
        run.warn(note)
    run.progress.console.print(f"wrote {output}", markup=False, highlight=False, soft_wrap=True)
    meta = {"text": seen, "notes": results["notes"], "command": "calibrate", "output": output, "calibration": about}
    run.finish(rows, meta=meta)


def _summary(heads: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for the heads of a layer."""
    row: dict[str, Any] = {"layer": heads[0]["layer"], "heads": len(heads)}
    for side in ("key", "value"):
        scales = [head[f"{side}_scale"] for head in heads]
        ranges = [head[f"{side}_range"] for head in heads if head[f"{side}_range"] is not None]
        row[f"{side}_largest"] = max(head[f"{side}_largest"] for head in heads)
        row[f"{side}_scales"] = f"{min(scales):.3g} - {max(scales):.3g}"
        row[f"{side}_range"] = min(ranges, default=None)
    return row


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"--output: {str(path)!r} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--output: {str(path)!r} may not be written")
