"""Which kernels a step runs, and how much of it they fill, as torch's profiler sees it."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


def profile_steps(step: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Per step: wall time, time with a kernel on the device, and kernels by the time they take.

    On a CPU the operators of torch stand for kernels. The profiler itself slows the host down: the
    wall time is that of the steps before it, without it.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    is_cuda = torch.cuda.is_available()
    step()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    wall_s = time.perf_counter() - start
    activities = [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            step()
        if is_cuda:
            torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        on_device = str(event.device_type).endswith("CUDA")
        if on_device != is_cuda:
            continue
        total = totals[event.name]
        total[0] += 1
        own_us = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
        total[1] += own_us
        spans.append((event.time_range.start, event.time_range.end))
    kernels = [
        {"name": name, "launches": count / num_steps, "ms": us / num_steps / 1e3}
        for name, (count, us) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]
    return {
        "wall_ms": wall_s / num_steps * 1e3,
        "busy_ms": _covered(spans) / num_steps / 1e3,
        "launches": sum(count for count, _ in totals.values()) / num_steps,
        "kernels": kernels,
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: kernels may overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
