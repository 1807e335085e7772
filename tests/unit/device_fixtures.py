"""Files of devices that are not here: a Pixel-like phone, a Raspberry Pi, a laptop with RAPL and a battery.

Written from the kernel's and AOSP's documentation of the formats. No proof for the machines themselves.
"""

from __future__ import annotations

from nas.measure.devices.describe import PROPERTIES
from nas.measure.devices.probes import android, memory
from nas.testing.fake_reader import FakeReader

CPU, SUPPLY, RAPL = "/sys/devices/system/cpu", "/sys/class/power_supply", "/sys/class/powercap"
ZONE, COOLING = "/sys/class/thermal/thermal_zone", "/sys/class/thermal/cooling_device"

LINUX = {
    "/proc/stat": "cpu  100 10 50 1000 7 1 2 37 5 5\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 5\n",
    "/proc/uptime": "1000.00 900.00\n",
    "/proc/loadavg": "0.25 0.10 0.05 1/200 4711\n",
    "/proc/vmstat": "nr_free_pages 7\noom_kill 3\n",
    "/proc/meminfo": "MemTotal:        8388608 kB\nMemFree:  1 kB\nMemAvailable:    2097152 kB\n",
    "/proc/self/smaps": "5500-5600 r-xp 0 0\nSize: 4 kB\nKernelPageSize:        4 kB\nMMUPageSize: 4 kB\n",
    "/proc/sys/kernel/osrelease": "6.1.0\n",
    "/proc/sys/kernel/hostname": "host\n",
}
DF = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/root 100000000 2 50000000 51% /\n"


def arm_core(number: int, part: str, features: str = "fp asimd asimddp") -> str:
    """One block of /proc/cpuinfo."""
    return (
        f"processor\t: {number}\nBogoMIPS\t: 49.15\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 0\n\n"
    )


def core_files(capacities: list[int], khz: list[int]) -> dict[str, str]:
    """The files of /sys for each core."""
    files = {f"{CPU}/online": f"0-{len(khz) - 1}\n"}
    for core, (capacity, top) in enumerate(zip(capacities, khz, strict=True)):
        files[f"{CPU}/cpu{core}/cpu_capacity"] = f"{capacity}\n"
        files[f"{CPU}/cpu{core}/cpufreq/cpuinfo_max_freq"] = f"{top}\n"
    return files


_PIXEL_PARTS = ["0xd05"] * 4 + ["0xd0b"] * 2 + ["0xd44"] * 2
PIXEL_FILES = (
    LINUX
    | core_files([160] * 4 + [498] * 2 + [1024] * 2, [1803000] * 4 + [2253000] * 2 + [2802000] * 2)
    | {
        "/proc/cpuinfo": "".join(
            arm_core(core, part, "fp asimd asimddp" + " i8mm" * (core > 5)) for core, part in enumerate(_PIXEL_PARTS)
        ),
        f"{CPU}/cpufreq/policy0/scaling_governor": "sched_pixel\n",
        f"{CPU}/cpufreq/policy0/scaling_cur_freq": "300000\n",
        f"{CPU}/cpufreq/policy0/related_cpus": "0 1 2 3\n",
        f"{CPU}/cpufreq/policy6/scaling_governor": "sched_pixel\n",
        f"{CPU}/cpufreq/policy6/scaling_cur_freq": "2802000\n",
        f"{CPU}/cpufreq/policy6/related_cpus": "6 7\n",
    }
)
PIXEL_SAYS = {
    "uname -m": "aarch64\n",
    PROPERTIES: (
        "[ro.boot.serialno]: [1A2B3C]\n[ro.build.id]: [UQ1A.240205.004]\n[ro.build.version.release]: [14]\n"
        "[ro.product.cpu.abilist]: [arm64-v8a,armeabi-v7a,armeabi]\n[ro.product.manufacturer]: [Google]\n"
        "[ro.product.model]: [Pixel 6]\n[ro.serialno]: [1A2B3C]\n[ro.soc.manufacturer]: [Google]\n"
        "[ro.soc.model]: [Tensor]\n"
    ),
    android.THERMAL: (
        "IsStatusOverride: false\nThermal Status: 0\nCached temperatures:\n"
        "\tTemperature{mValue=99.0, mType=0, mName=OLD, mStatus=0}\nHAL Ready: true\n"
        "Current temperatures from HAL:\n\tTemperature{mValue=41.2, mType=0, mName=BIG, mStatus=0}\n"
        "\tTemperature{mValue=38.5, mType=0, mName=LITTLE, mStatus=0}\n"
        "\tTemperature{mValue=44.0, mType=3, mName=skin, mStatus=0}\nCurrent cooling devices from HAL:\n"
    ),
    android.BATTERY: (
        "Current Battery Service state:\n  AC powered: false\n  USB powered: true\n  Wireless powered: false\n"
        "  Dock powered: false\n  status: 2\n  health: 2\n  level: 81\n  scale: 100\n  temperature: 285\n"
    ),
    android.POWER: "  mWakefulness=Asleep\n  mSettingBatterySaverEnabled=false\n",
    memory.DISK: DF,
}
ODPM = {
    "/sys/bus/iio/devices/iio:device0/energy_value": "t=5000\nCH0(T=5000)[S4M_VDD_CPUCL0], 1000000\n"
    "CH1(T=5000)[S2M_VDD_CPUCL2], 2000000\n",
    "/sys/bus/iio/devices/iio:device1/energy_value": "t=5000\nCH0(T=5000)[VSYS_PWR_MMWAVE], 500000\n",
}

PI_FILES = (
    LINUX
    | core_files([1024] * 4, [2400000] * 4)
    | {
        "/proc/cpuinfo": "".join(arm_core(core, "0xd0b") for core in range(4)),
        "/sys/firmware/devicetree/base/model": "Raspberry Pi 5 Model B Rev 1.0\0",
        "/sys/firmware/devicetree/base/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0",
        "/sys/firmware/devicetree/base/serial-number": "10000000abcdef01\0",
        "/etc/machine-id": "0123456789abcdef0123456789abcdef\n",
        "/etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
        "/sys/devices/platform/soc/soc:firmware/get_throttled": "0\n",
        f"{ZONE}0/type": "cpu-thermal\n",
        f"{ZONE}0/temp": "52100\n",
    }
)

LAPTOP_FILES = LINUX | {
    "/proc/cpuinfo": "".join(
        f"processor\t: {core}\nmodel name\t: 12th Gen Intel(R) Core(TM) i5-1240P\nflags\t\t: fpu avx avx2 fma\n\n"
        for core in range(16)
    ),
    **core_files([1024] * 8 + [700] * 8, [4400000] * 6 + [4500000] * 2 + [3300000] * 8),
    "/sys/devices/cpu_core/cpus": "0-7\n",
    "/sys/devices/cpu_atom/cpus": "8-15\n",
    "/etc/machine-id": "fedcba9876543210fedcba9876543210\n",
    f"{RAPL}/intel-rapl:0/name": "package-0\n",
    f"{RAPL}/intel-rapl:0/energy_uj": "262143000000\n",
    f"{RAPL}/intel-rapl:0/max_energy_range_uj": "262143328850\n",
    f"{RAPL}/intel-rapl:0:0/name": "core\n",
    f"{RAPL}/intel-rapl:0:0/energy_uj": "5\n",
    f"{RAPL}/intel-rapl:0:0/max_energy_range_uj": "262143328850\n",
    f"{RAPL}/intel-rapl:1/name": "psys\n",
    f"{RAPL}/intel-rapl:1/energy_uj": "5\n",
    f"{SUPPLY}/AC/type": "Mains\n",
    f"{SUPPLY}/AC/online": "0\n",
    f"{SUPPLY}/BAT0/type": "Battery\n",
    f"{SUPPLY}/BAT0/status": "Discharging\n",
    f"{SUPPLY}/BAT0/capacity": "81\n",
    f"{SUPPLY}/BAT0/energy_now": "40000000\n",
    f"{SUPPLY}/mouse/type": "Battery\n",
    f"{SUPPLY}/mouse/scope": "Device\n",
    f"{SUPPLY}/mouse/status": "Discharging\n",
    f"{SUPPLY}/mouse/energy_now": "7\n",
}
"""A hybrid processor; two of its P cores clock a step higher than the others."""


def pixel(**changes: str | OSError) -> FakeReader:
    """The phone, over USB."""
    return FakeReader(PIXEL_FILES | changes, PIXEL_SAYS)


def raspberry_pi(**changes: str | OSError) -> FakeReader:
    """The board."""
    return FakeReader(PI_FILES | changes, {"uname -m": "aarch64\n", memory.DISK: DF})


def laptop(**changes: str | OSError) -> FakeReader:
    """The laptop, on its battery, whose user may read RAPL."""
    files = LAPTOP_FILES | {"/proc/sys/kernel/random/boot_id": "6f1c2a9e-boot\n"} | changes
    commands = {"uname -m": "x86_64\n", "getconf GNU_LIBC_VERSION": "glibc 2.36\n", memory.DISK: DF}
    return FakeReader(files, commands)
