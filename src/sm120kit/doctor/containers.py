"""Containers: what a host needs to start one with GPUs, and what one was given."""

from __future__ import annotations

from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, not_applicable, ok, problem, unknown
from sm120kit.host import Host

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
SHM_FLOOR = 8 << 30
STACK_FLOOR = 64 << 20
RECIPES = "local-inference-lab/rtx6kpro models/; brandonmmusic-max/sm120-moe-bench README"


@check("container-toolkit", "docker can hand out GPUs", Scope.GPU, "NVIDIA Container Toolkit, installation guide")
def toolkit(host: Host) -> Verdict:
    if host.container.inside:
        return not_applicable("this is a container")
    if not host.container.docker:
        return not_applicable("docker is not installed")
    if not host.container.toolkit:
        return problem(
            Impact.BREAKS,
            "docker is there, nvidia-ctk is not",
            cause="the NVIDIA Container Toolkit is not installed",
            consequence='docker run --gpus all ends with: could not select device driver "" with capabilities: [[gpu]]',
            fix="install nvidia-container-toolkit; sudo nvidia-ctk runtime configure --runtime=docker; "
            "sudo systemctl restart docker",
        )
    how = [name for name, there in (("docker runtime", host.container.runtime), ("CDI", host.container.cdi)) if there]
    return ok(f"NVIDIA Container Toolkit{': ' + ' and '.join(how) if how else ''}")


@check("shm", "shared memory suffices", Scope.PAIR, f"{RECIPES}; radixark/miles_diffusion#13")
def shm(host: Host) -> Verdict:
    size = host.container.shm_bytes
    if size is None:
        return unknown(host.why("/proc/self/mounts"), "df -h /dev/shm")
    if size < SHM_FLOOR:
        return problem(
            Impact.BREAKS,
            f"/dev/shm has {size >> 20} MiB",
            cause="docker gives a container 64 MiB unless told otherwise",
            consequence="NCCL and the engine's workers run out of it: a crash or a hang while they start",
            fix="docker run --ipc=host, or --shm-size=32g; on a host: sudo mount -o remount,size=32G /dev/shm",
        )
    return ok(f"/dev/shm has {size >> 30} GiB")


@check("ulimits", "memory may be locked, stacks may grow", Scope.GPU, RECIPES)
def ulimits(host: Host) -> Verdict:
    if not host.container.inside:
        return not_applicable("a container has limits of its own: docker run --ulimit sets them")
    memlock, stack = host.container.memlock, host.container.stack
    if memlock is None or stack is None:
        return unknown(host.why("/proc/self/limits"), "ulimit -l; ulimit -s")
    low = [f"memlock {memlock} B"] if memlock != -1 else []
    low += [f"stack {stack} B"] if 0 <= stack < STACK_FLOOR else []
    if low:
        return problem(
            Impact.MINOR,
            ", ".join(low),
            cause="docker's defaults",
            consequence="pinned host buffers cannot be had, deep recursion while compiling ends in a crash",
            fix="docker run --ulimit memlock=-1 --ulimit stack=67108864",
        )
    return ok("unlimited memlock, stack of 64 MiB or more")


@check(
    "cuda-compat",
    "no compatibility libraries on GeForce",
    Scope.GPU,
    f"{WIKI} troubleshooting/common-issues.md; CUDA Compatibility guide",
)
def compat(host: Host) -> Verdict:
    if not host.container.compat:
        return not_applicable("no CUDA compatibility libraries")
    if any(gpu.consumer for gpu in host.gpus):
        places = sorted({path.rpartition("/")[0] for path in host.container.compat})
        return problem(
            Impact.BREAKS,
            ", ".join(places),
            cause="forward compatibility is for data center GPUs; these libraries shadow the driver's own",
            consequence="CUDA error 804: forward compatibility was attempted on non supported HW",
            fix="hide them: " + " ".join(f"--mount type=tmpfs,destination={place}" for place in places),
        )
    return ok("compatibility libraries beside an RTX PRO GPU")


@check("cudart", "one CUDA runtime per toolkit", Scope.GPU, f"{WIKI} daily-summaries 2026-04-17")
def cudart(host: Host) -> Verdict:
    if host.container.strange_cudart:
        return problem(
            Impact.BREAKS,
            ", ".join(host.container.strange_cudart),
            cause="a runtime of another major version lies among a toolkit's libraries",
            consequence="FlashInfer or torch load both and end at once",
            fix=f"sudo rm {' '.join(host.container.strange_cudart)}",
        )
    return ok("no strange libcudart")


@check("left-behind", "no server was left behind", Scope.GPU, "docker run manual: a container outlives a client that is killed")
def left_behind(host: Host) -> Verdict:
    left = [each for each in host.launched if not each.attended]
    if left:
        named = [f"{each.name} ({each.configuration}, GPU {', '.join(map(str, each.gpus))})" for each in left]
        return problem(
            Impact.BREAKS,
            f"runs without the sm120kit launch that started it: {', '.join(named)}",
            cause="that process was killed before it could stop its container",
            consequence="the GPUs' memory is taken, and the next server does not find it",
            fix=f"docker stop {' '.join(each.name for each in left)}",
        )
    return ok(f"{len(host.launched) or 'no'} containers of sm120kit launch")


CHECKS: tuple[Check, ...] = (toolkit, left_behind, shm, ulimits, compat, cudart)
