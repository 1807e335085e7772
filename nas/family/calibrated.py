"""A bench that a family's command begins with and goes on with."""

from __future__ import annotations

from nas.core.canonical import result_key
from nas.core.space import RuntimeSpace
from nas.service.benches import Kept, Preparer, known_runtime
from nas.service.stage_work import Bench
from nas.store import results


async def calibrated_bench(
    preparer: Preparer, device_name: str, spec: RuntimeSpace, purpose: str, *, replicate: int = 0
) -> Bench:
    """A device with a runtime. On a noisy machine every calibration is another one, so the first one is kept.

    Args:
        preparer: makes the bench.
        device_name: as in a space.
        spec: the runtime.
        purpose: whose calibration it is: figures of one purpose are ratios to one.
        replicate: a higher number calibrates anew.

    Raises:
        NasError: see `Preparer.bench`.
    """
    if not preparer.accept_noise:
        return await preparer.bench(device_name, spec)
    device, runtime, store = preparer.farm.device(device_name), known_runtime(spec), preparer.farm.store
    runner = runtime.runner(device.target, device.cpu_features, patched=spec.build == "any", libc=device.libc)
    key = result_key(purpose, device=device.id, build=runner.build, replicate=replicate)
    row = results.get(store, key)
    bench = await preparer.bench(device_name, spec, Kept(runner.build, row.payload["ms"]) if row else None)
    results.put(store, key, "measure", {"ms": bench.reference.calibration_ms})
    return bench
