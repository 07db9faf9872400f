"""Advice on the user's script, for training with the recommended configuration."""

from __future__ import annotations

from dsat.command import ds_config, switches
from dsat.run import free_batch
from dsat.run.run import Run, own_switches
from dsat.run.strategies import keeps_micro_batch
from dsat.space.deepspeed_settings import BUCKETS
from dsat.space.overrides import GATHER
from dsat.values import format as fmt
from dsat.values.text import hide_secrets_in_values
from dsat.values.trial import Trial
from dsat.values.zero_strategy import read_strategy

_BUCKET = "reduce_bucket_size"
_LARGE_BUCKET = 1 / 16  # of a device's memory, as in dsat.run.strategies


def blame_bucket(run: Run, trial: Trial) -> str:
    """Return a clause on the memory of DeepSpeed's default bucket; empty if it takes little."""
    config, profile = run.plan.config(trial.overrides), run.profile
    zero = config.get("zero_optimization") or {}
    if profile is None or read_strategy(config).stage == 0 or zero.get(_BUCKET) is not None:
        return ""
    count = 2 if zero.get("overlap_comm") is True else 1
    size_bytes = count * BUCKETS[0] * profile.param_bytes
    if size_bytes < _LARGE_BUCKET * profile.slot_memory_bytes:
        return ""
    return (
        f"; DeepSpeed's default {_BUCKET} of {BUCKETS[0]:,} takes {fmt.memory(size_bytes)} of the "
        f"{fmt.memory(profile.slot_memory_bytes)}"
    )


def advise_batch(run: Run) -> list[str]:
    """Return why the micro batch was not searched, and how to search it; empty if it was."""
    plan = run.plan
    batch = plan.own_batch
    fixed = next((outcome for outcome in run.outcomes.values() if outcome.fixed_batch), None)
    mapping, flag = "--arg-mapping train_micro_batch_size_per_gpu=", run.batch_flag.name
    if run.batch_flag.is_guess:
        return [
            f"Micro batch: the script's {flag} may have to change with the micro batch. If so, add "
            f"{mapping}{flag}."
        ]
    if fixed is not None and not flag:
        fed = fmt.count(fixed.fixed_batch or 0, "sample")
        advice = (
            "Read the micro batch from engine.train_micro_batch_size_per_gpu(), or name the "
            f"script's flag: {mapping}FLAG."
        )
        if fixed.batch_flag:
            advice = f"Add {mapping}{fixed.batch_flag}."
        if run.batch_flag.refused:
            *_, (flag, message) = run.batch_flag.refused.items()
            advice = f"A trial with {flag} failed: {message}."
        return [
            f"Micro batch: not searched, because the script feeds {fed} whatever the configuration "
            f"says. {advice}"
        ]
    if run.profiled is not None and keeps_micro_batch(plan, run.profiled):
        return [
            f"Micro batch: kept at {batch.micro_batch}, because the loss compares the samples of a "
            "micro batch with each other: another size changes the training. "
            "--train-batch-size any searches other sizes."
        ]
    if not free_batch.is_batch_minimal(plan):
        return []
    searches = "--train-batch-size any searches larger batches, which change the training"
    predicted = free_batch.predict(run) if run.stop_reason is not None else None
    if predicted is not None:
        searches += (
            f". With a micro batch of {predicted.micro_batch}, your configuration is predicted to "
            f"be {predicted.gain:.2g}x as fast"
        )
    return [
        f"Global batch: {plan.train_batch_size} is one sample per device, so the micro batch was "
        f"not searched. {searches}."
    ]


def advise_learning_rate(run: Run) -> list[str]:
    """Advise on the learning rate if the best global batch size differs from the user's.

    Square-root scaling for adaptive optimizers (Malladi et al., arXiv:2205.10287), linear scaling
    for SGD (Goyal et al., arXiv:1706.02677).
    """
    if run.best is None:
        return []
    old, new = run.plan.own_batch.train_batch_size, run.best.batch.train_batch_size
    if old == new:
        return []
    optimizer = run.plan.base_config.get("optimizer") or {}
    ratio = new / old
    root, linear = f"sqrt({new}/{old}) = {ratio**0.5:.3g}", f"{new}/{old} = {ratio:.3g}"
    kind = str(optimizer.get("type", "")).lower()
    if "sgd" in kind:
        factor = linear
    elif kind:
        factor = root
    else:
        factor = f"{root} with an Adam-like optimizer, by {linear} with SGD"
    advice = f"Learning rate: multiply it by {factor}, because the global batch changes."
    return [advice, *_scale_schedule(run, ratio)]


def _scale_schedule(run: Run, ratio: float) -> list[str]:
    parameters = ds_config.at(run.plan.base_config, "scheduler.params") or {}
    lengths = {
        key: value
        for key, value in parameters.items()
        if key.endswith(("_num_steps", "_step_size")) and type(value) is int and value > 0
    }
    if not lengths:
        return []
    scaled = [f"{key} {n} -> {max(1, round(n / ratio))}" for key, n in lengths.items()]
    advice = f"Schedule: to keep the number of samples, change {', '.join(scaled)}."
    if "total_num_steps" in lengths:  # HfTrainerDeepSpeedConfig.trainer_config_finalize
        advice += (
            " If the Trainer's length is a number of epochs, it accepts only the total_num_steps "
            "that it computes itself. Its error message shows this number."
        )
    return [advice]


def advise_script(run: Run, best: Trial) -> list[str]:
    """Return what to set in the script or its arguments for the best configuration."""
    current, declared = own_switches(run), {} if run.profile is None else run.profile.switches
    warnings = run.outcomes[best.id].warnings
    has_arguments = any(switch.in_arguments for switch in declared.values())
    how = [
        switches.instruction(
            name, value, in_arguments=has_arguments and not switches.is_of_code(name, declared)
        )
        for name, value in hide_secrets_in_values(best.script_args).items()
        if current.get(name) != best.script_args[name]
    ]
    sizes, user_sizes = best.batch.config(), run.plan.own_batch.config()
    how += [
        f"{flag} {sizes[key]}" for key, flag in best.flags.items() if sizes[key] != user_sizes[key]
    ]
    how += [
        switches.OF_CODE[text].format(best.batch, run.plan.own_batch)
        for text in warnings
        if text in switches.OF_CODE
    ]
    needs = (
        f"Script: the best configuration needs {'; '.join(how)}. The training command sets this."
    )
    advice = [needs] if how else []
    if (best.overrides.get("compile") or {}).get("deepcompile") is True:
        advice.append("Script: DeepCompile needs engine.compile() after deepspeed.initialize.")
    return advice


def advise_saving(run: Run, best: Trial) -> list[str]:
    """Return how to save the model if the best trial uses stage 3, but the user's does not."""
    if best.stage != 3 or read_strategy(run.plan.base_config).stage == 3:
        return []
    return [
        "Saving: in stage 3, state_dict() contains only shards. Save with engine.save_16bit_model, "
        f"or convert a checkpoint with zero_to_fp32.py. With {GATHER}, the Trainer and "
        "accelerator.get_state_dict save whole models."
    ]
