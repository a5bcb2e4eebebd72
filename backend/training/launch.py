"""accelerate's launcher with its own flags, for the trainer: `python -m backend.training.launch --config_file
zero2.yaml -m backend.training --flags`.

A configuration with DeepSpeed needs no package here, as its stages are carried out by torch
(`backend.training.model.fsdp`), and a run that ends by a sentence ends with it, not with the launcher's traceback.
"""

from __future__ import annotations

import logging
import subprocess
import sys


def main(argv: list[str]) -> int:
    """Exit status: that of a process that failed, as a sentence of its own has said; 1 where the launcher itself did; 2
    for wrong flags."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What a process ended by, it says itself, and what it was ended by from outside is said below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        args, defaults, mixed = launch._validate_launch_command(launch.launch_command_parser().parse_args(argv))
        if args.use_deepspeed and not args.cpu and args.num_machines == 1:
            fields = [*getattr(defaults, "deepspeed_config", ()), *(["mixed_precision"] if mixed else [])]
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            _, environment = prepare_deepspeed_cmd_env(args)
            _start(args, environment)
        else:
            launch.launch_command(args)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 1
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        if failure.exitcode < 0:  # ended from outside, so that it could not say so itself
            print(f"A process of the run was ended: {failure.message}", file=sys.stderr)
        return max(failure.exitcode, 1)
    except (ImportError, ValueError, OSError) as error:
        print(f"The launcher cannot start the run: {error}", file=sys.stderr)
        return 1
    return 0


def _start(args, environment: dict[str, str]) -> None:
    """What accelerate's launcher does for DeepSpeed on one machine, which needs nothing of that package."""
    import torch.distributed.run as several
    from accelerate.utils import patch_environment
    from accelerate.utils.launch import _filter_args

    script = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
    told = _filter_args(args, several.get_args_parser(), script)
    with patch_environment(**environment):
        several.run(told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
