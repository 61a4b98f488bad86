"""Checks of containers: whether a host can start one with GPUs, and the limits and libraries inside one."""

from __future__ import annotations

from sm120kit.hosts.doctor._findings import Diagnosis, HostCheck, Impact, Scope, check, not_applicable, ok, problem, unknown
from sm120kit.hosts.facts import Host

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
SHM_FLOOR = 8 << 30
STACK_FLOOR = 64 << 20
RECIPES = "local-inference-lab/rtx6kpro models/; brandonmmusic-max/sm120-moe-bench README"


@check("container-toolkit", "Docker can pass GPUs to containers", Scope.GPU, "NVIDIA Container Toolkit, installation guide")
def toolkit(host: Host) -> Diagnosis:
    if host.container.inside:
        return not_applicable("doctor runs in a container")
    if not host.container.docker:
        return not_applicable("Docker is not installed")
    if not host.container.toolkit:
        return problem(
            Impact.BREAKS,
            "docker is installed, nvidia-ctk is not",
            cause="the NVIDIA Container Toolkit is not installed",
            consequence='docker run --gpus all fails: could not select device driver "" with capabilities: [[gpu]]',
            fix="install nvidia-container-toolkit; sudo nvidia-ctk runtime configure --runtime=docker; "
            "sudo systemctl restart docker",
        )
    modes = (("docker runtime", host.container.runtime), ("CDI", host.container.cdi))
    configured = " and ".join(name for name, present in modes if present)
    return ok(f"NVIDIA Container Toolkit{f': {configured}' if configured else ''}")


@check("shm", "/dev/shm has at least 8 GiB", Scope.PAIR, f"{RECIPES}; radixark/miles_diffusion#13")
def shm(host: Host) -> Diagnosis:
    size = host.container.shm_bytes
    if size is None:
        return unknown(host.missing_reason("/proc/self/mounts"), "df -h /dev/shm")
    if size < SHM_FLOOR:
        return problem(
            Impact.BREAKS,
            f"/dev/shm has {size >> 20} MiB",
            cause="Docker's default is 64 MiB per container",
            consequence="NCCL and the engine's workers exhaust it: a crash or a hang at startup",
            fix="docker run --ipc=host, or --shm-size=32g; on a host: sudo mount -o remount,size=32G /dev/shm",
        )
    return ok(f"/dev/shm has {size >> 30} GiB")


@check("ulimits", "memlock is unlimited, and the stack limit is at least 64 MiB", Scope.GPU, RECIPES)
def ulimits(host: Host) -> Diagnosis:
    if not host.container.inside:
        return not_applicable("a container has its own limits: docker run --ulimit")
    memlock, stack = host.container.memlock, host.container.stack
    if memlock is None or stack is None:
        return unknown(host.missing_reason("/proc/self/limits"), "ulimit -l; ulimit -s")
    low = [f"memlock {memlock} B"] if memlock != -1 else []
    low += [f"stack {stack} B"] if 0 <= stack < STACK_FLOOR else []
    if low:
        return problem(
            Impact.MINOR,
            ", ".join(low),
            cause="Docker's defaults",
            consequence="pinned host buffers cannot be allocated; deep recursion while compiling crashes",
            fix="docker run --ulimit memlock=-1 --ulimit stack=67108864",
        )
    return ok("memlock unlimited, stack 64 MiB or more")


@check(
    "cuda-compat",
    "no CUDA compatibility libraries with GeForce",
    Scope.GPU,
    f"{WIKI} troubleshooting/common-issues.md; CUDA Compatibility guide",
)
def compat(host: Host) -> Diagnosis:
    if not host.container.compat:
        return not_applicable("no CUDA compatibility libraries")
    if any(gpu.consumer for gpu in host.gpus):
        directories = sorted({path.rpartition("/")[0] for path in host.container.compat})
        return problem(
            Impact.BREAKS,
            ", ".join(directories),
            cause="forward compatibility supports data center GPUs only, and these libraries shadow the driver's own",
            consequence="CUDA error 804: forward compatibility was attempted on non supported HW",
            fix="hide them: " + " ".join(f"--mount type=tmpfs,destination={directory}" for directory in directories),
        )
    return ok("CUDA compatibility libraries with an RTX PRO GPU")


@check(
    "left-behind",
    "no container of a killed sm120kit serve is running",
    Scope.GPU,
    "docker run manual: a container outlives a client that is killed",
)
def left_behind(host: Host) -> Diagnosis:
    orphans = [container for container in host.launched if not container.attended]
    if orphans:
        names = [f"{orphan.name} ({orphan.configuration}, GPU {', '.join(map(str, orphan.gpus))})" for orphan in orphans]
        return problem(
            Impact.BREAKS,
            f"running without the sm120kit serve that started it: {', '.join(names)}",
            cause="that process was killed before it could stop its container",
            consequence="the container occupies GPU memory that the next server needs",
            fix=f"docker stop {' '.join(orphan.name for orphan in orphans)}",
        )
    return ok(f"{len(host.launched) or 'no'} containers of sm120kit serve")


CHECKS: tuple[HostCheck, ...] = (toolkit, left_behind, shm, ulimits, compat)
