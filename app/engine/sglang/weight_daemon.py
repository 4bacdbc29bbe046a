"""The process that keeps the weights (app.engine.sglang.allowed_args): SGLang's own, started by our settings.

It serves only engines whose model and layout are the same, so both read the same settings file.
"""

from __future__ import annotations

import json
import os
import sys

from app.engine.sglang.allowed_args import check, check_weight_cache
from app.engine.sglang.args import SGLangOptions, with_ranks
from app.engine.sglang.platform import needs_cpu_platform, prepare_process
from app.settings import EXIT_CONFIG, SettingsError, load

PROGRAM = "sglang.srt.weight_cache.daemon"
SHARED = (
    "attn_cp_size",
    "base_gpu_id",
    "download_dir",
    "dp_size",
    "dtype",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "ep_size",
    "gpu_id_step",
    "json_model_override_args",
    "load_format",
    "model_loader_extra_config",
    "moe_a2a_backend",
    "moe_dense_tp_size",
    "moe_dp_size",
    "pp_size",
    "quantization",
    "revision",
    "trust_remote_code",
)
"""Arguments of the engine that decide which weights lie where; the process must have the same."""


def daemon_command(options: SGLangOptions) -> list[str]:
    """The argv of the process for these options. Raises SettingsError. Imports SGLang."""
    check(options.server_args, options.where)
    options = with_ranks(options)
    wanted = {"model_path": options.model_path, **options.server_args, "weight_cache_mode": "client"}
    check_weight_cache(wanted, options.where, has_gpu=not needs_cpu_platform())
    argv = [sys.executable, "-m", PROGRAM, "--model-path", options.model_path, "--tp-size", str(options.tp)]
    for name in SHARED:
        value = options.server_args.get(name)
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            argv.append(flag)
        elif value not in (None, False):
            argv += [flag, value if isinstance(value, str) else json.dumps(value)]
    return argv


def main() -> None:
    """Become the process, with the settings that the server has."""
    prepare_process()
    settings = load({}, os.environ)
    command = daemon_command(
        SGLangOptions(
            model=settings.model, tp=settings.tp, server_args=settings.engine_args.get("sglang", {})
        )
    )
    os.execv(command[0], command)  # noqa: S606  # SGLang's own program, with the operator's arguments


if __name__ == "__main__":
    try:
        main()
    except SettingsError as error:
        print(f"tokenring: {error}", file=sys.stderr)  # noqa: T201  # a command says why it ends
        sys.exit(EXIT_CONFIG)
