"""What a program may try: each attempt is made by the program in a real sandbox, and what it got is checked.

Also where the machine forbids namespaces, Landlock or both, as far as the sandbox promises something there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from slime_sandbox_local import LocalSandbox, SandboxError, SandboxLimits, isolation_here

from tests.unit.sandboxes.local.forbidden import MODES, forbid, python_of_all, skip_unless_possible
from tests.until import wait_until

pytestmark = pytest.mark.skipif(not isolation_here().complete, reason=f"no complete isolation here: {isolation_here()}")
TIME = 60.0
SECRET = "the-secret-of-the-run"


class Shared:
    """One sandbox for the attempts that leave it whole, on a loop of its own, in a thread that may not do all."""

    def __init__(self, limits: SandboxLimits, mode: str = "all") -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, args=(mode,), daemon=True)
        self.thread.start()
        self.box = LocalSandbox(limits, isolation="require" if mode == "all" else "best-effort")
        with python_of_all():
            self.do(self.box.__aenter__())
        self.own_files = "namespace" not in " ".join(self.box.missing)
        self.kept_apart = self.own_files or "landlock" not in self.box.missing
        """Files and devices that anybody may open are not open to it."""

    def _run(self, mode: str) -> None:
        forbid(mode)
        self.loop.run_forever()

    def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(TIME + 30)

    def python(self, code: str, *arguments: object) -> str:
        result = self.do(self.box.exec(["python3", "-c", code, *map(str, arguments)], timeout=TIME))
        return str(result.out + result.err)

    def shell(self, command: str, timeout: float = TIME) -> str:
        result = self.do(self.box.exec(command, timeout=timeout))
        return str(result.out + result.err)

    def close(self) -> None:
        self.do(self.box.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(TIME)
        self.loop.close()


@pytest.fixture(
    scope="module",
    params=[m if m in ("all", "namespaces and landlock") else pytest.param(m, marks=pytest.mark.slow) for m in MODES],
)
def mode(request: pytest.FixtureRequest) -> str:
    """What the machine forbids."""
    skip_unless_possible(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def box(mode: str) -> Iterator[Shared]:
    os.environ["SLIME_TEST_SECRET"] = SECRET
    shared = Shared(SandboxLimits(memory_mb=512, disk_mb=16, file_mb=4, processes=24, open_files=64), mode)
    yield shared
    shared.close()
    del os.environ["SLIME_TEST_SECRET"]


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that anybody may use."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_what_is_missing_is_said(box: Shared, mode: str) -> None:
    wanted = {
        "all": [], "landlock": [], "namespaces": ["user namespace"], "mounts": ["mount namespace", "pid namespace"],
        "namespaces and landlock": ["user namespace", "landlock"],
    }  # fmt: skip
    assert list(box.box.missing) == wanted[mode]


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_of_the_host_are_not_there(box: Shared, open_dir: Path) -> None:
    outside = open_dir / "outside"
    outside.write_text(SECRET)
    outside.chmod(0o666 if box.kept_apart else 0o600)
    for path in ("/etc/shadow", str(outside), "/root/.bashrc", "/var/log/btmp", "/run/secrets"):
        said = box.shell(f"cat {path}")
        assert "No such file" in said or ("Permission denied" in said and not box.own_files), path
    attempts = f"echo x > {outside}; echo x > /etc/cron.d/x; echo x > /usr/bin/x; touch /lib/x"
    assert box.shell(attempts).count("cannot") >= 4
    assert outside.read_text() == SECRET
    if box.kept_apart:
        assert "cannot" in box.shell(f"echo x > {open_dir}/new")
        assert os.listdir(open_dir) == ["outside"]


def test_it_is_never_root(box: Shared) -> None:
    ids = box.python("import os; print(*os.getresuid(), *os.getresgid(), *os.getgroups())").split()
    assert "0" not in ids
    assert ids[0] != str(os.getuid())


@pytest.mark.parametrize("link", ["/etc/shadow", "/proc/1/root/etc/shadow", "/proc/self/root/../../etc/shadow"])
def test_a_link_leads_nowhere_else(box: Shared, link: str) -> None:
    box.shell(f"rm -f link; ln -s {link} link")
    with pytest.raises(SandboxError, match=r"No such file|Permission denied"):
        box.do(box.box.read_file("link"))


def test_a_file_written_through_a_link_stays_inside(box: Shared, open_dir: Path) -> None:
    target = open_dir / "target"
    target.write_text("before")
    target.chmod(0o666 if box.kept_apart else 0o600)
    box.shell(f"rm -rf link folder; ln -s {target} link; ln -s /usr folder")
    with pytest.raises(SandboxError, match="cannot write link"):
        box.do(box.box.write_file("link", "after"))
    with pytest.raises(SandboxError, match="cannot write folder/x"):
        box.do(box.box.write_file("folder/x", "after"))
    assert target.read_text() == "before"


def test_a_pipe_instead_of_a_file_holds_nobody_up(box: Shared) -> None:
    box.shell("rm -f pipe; mkfifo pipe")
    assert box.do(box.box.read_file("pipe")) == b""
    with pytest.raises(SandboxError, match="cannot write pipe"):
        box.do(box.box.write_file("pipe", "x"))


def test_descriptors_of_the_run_are_not_there(box: Shared) -> None:
    said = box.python("import os; print(*sorted(os.listdir('/proc/self/fd')))")
    assert said.split() == ["0", "1", "2", "3"]  # 3: the directory that is listed
    parent = "/proc/$PPID"
    denied = box.shell(f"ls {parent}/fd; cat {parent}/environ; ls {parent}/cwd/; ls {parent}/root/; cat {parent}/mem")
    assert denied.count("Permission denied") == 5


def test_secrets_of_the_environment_are_not_there(box: Shared) -> None:
    assert os.environ["SLIME_TEST_SECRET"] == SECRET
    assert SECRET not in box.shell("env; cat /proc/*/environ; cat /proc/*/cmdline")


def test_shared_memory_is_its_own(box: Shared) -> None:
    mine = Path("/dev/shm") / f"slime-test-{os.getpid()}"
    mine.write_text(SECRET)
    mine.chmod(0o600)
    try:
        if box.own_files:
            assert box.shell("ls /dev/shm; echo x > /dev/shm/theirs; ls /dev/shm") == "theirs\n"
        elif box.kept_apart:
            assert "cannot create" in box.shell("echo x > /dev/shm/theirs")
        assert SECRET not in box.shell(f"cat {mine}")
        assert not (mine.parent / "theirs").exists()
    finally:
        mine.unlink()


def test_no_devices(box: Shared) -> None:
    assert "Operation not permitted" in box.shell("mknod disk b 254 0")
    names = "/dev/vda /dev/sda /dev/mem /dev/kmsg" + " /dev/kvm /dev/fuse /dev/ptmx" * box.kept_apart
    said = box.shell(f"head -c 1 {names}")
    assert len(re.findall("No such file|Permission denied|not permitted", said)) == len(names.split())


# -- network -----------------------------------------------------------------------------------------------------------


def test_listeners_of_the_host_are_not_reached(box: Shared, open_dir: Path) -> None:
    name, path = f"\0slime-test-{os.getpid()}", open_dir / "docker.sock"
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    unix, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with tcp, udp, unix, named:
        udp.bind(("127.0.0.1", 0))
        unix.bind(name)
        named.bind(str(path))
        path.chmod(0o666)
        for one in (unix, named):
            one.listen()
        code = """
import socket, sys
for family, kind, target in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(sys.argv[1]))),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", int(sys.argv[2]))),
    (socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + sys.argv[3]),
    (socket.AF_UNIX, socket.SOCK_STREAM, sys.argv[4]),
    (socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("169.254.169.254", 80)),
    (socket.AF_VSOCK, socket.SOCK_STREAM, (2, 1)),
    (socket.AF_PACKET, socket.SOCK_RAW, ("lo", 0)),
    (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)),
):
    try:
        s = socket.socket(family, kind)
        s.settimeout(5)
        s.connect(target)
        s.send(b"x")
        print("sent")
    except OSError as error:
        print(type(error).__name__)
try:
    print(socket.getaddrinfo("example.com", 80))
except OSError as error:
    print(type(error).__name__)
"""
        said = box.python(code, tcp.getsockname()[1], udp.getsockname()[1], name[1:], path).split()
        del said[1]  # a datagram to the namespace's own loopback goes nowhere, but goes
        refused = ["ConnectionRefusedError"] * 2 + ["FileNotFoundError"] + ["OSError"] * 2  # there is no route
        without = ["PermissionError"] * 5
        if box.box.missing.get("mount namespace"):
            without = ["PermissionError"] * 4 + ["OSError"]
        assert said[:5] == (refused if box.own_files else without)
        assert said[5:] == ["PermissionError"] * 3 + ["gaierror"]
        pair = "import socket; a, b = socket.socketpair(); a.send(b'through'); print(b.recv(9).decode())"
        assert box.python(pair) == "through\n"
        for one, call in ((tcp, tcp.accept), (udp, lambda: udp.recv(1)), (unix, unix.accept), (named, named.accept)):
            one.settimeout(0.1)
            with pytest.raises(TimeoutError):
                call()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_of_the_host_are_neither_seen_nor_signalled(box: Shared, mode: str) -> None:
    other = Shared(SandboxLimits(), mode)
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        other.shell("sleep 1000 & echo")
        pids = [os.getpid(), os.getppid(), victim.pid]
        said = box.shell("for p in {}; do kill -9 $p; done; kill -9 -1; echo $?".format(" ".join(map(str, pids))))
        assert said.count("No such process") + said.count("not permitted") >= 3
        assert victim.poll() is None
        if box.own_files:
            seen = partial(other.shell, "cat /proc/[0-9]*/comm")
            wait_until(lambda: "sleep" in seen(), "the shell's child, which may not be sleep yet")
        assert other.shell("echo alive") == "alive\n"
    finally:
        victim.kill()
        victim.wait(TIME)
        other.close()


AS_A_USER = """
import os, sys, json
from tests.unit.sandboxes.local.forbidden import forbid, python_of_all
from slime_sandbox_local import LocalSandbox, SandboxError, SandboxLimits
from slime_sandbox_local.inside import kernel
import asyncio, ctypes, logging, orjson
forbid(sys.argv[1])
os.setgroups([]); os.setresgid(1234, 1234, 1234); os.setresuid(1234, 1234, 1234)
kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # as after the start of a program; the change of user cleared it
os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
value = ctypes.create_string_buffer(b"HARNESS-VALUE-0001")
TRY = '''
import os
for name in ("mem", "environ", "maps"):
    try:
        with open(f"/proc/{%d}/{name}", "r+b" if name == "mem" else "rb", buffering=0) as file:
            if name == "mem":
                file.seek(%d); print(name, file.write(b"PWNED"))
            else:
                print(name, len(file.read()))
    except OSError as error:
        print(name, "no")
''' % (os.getpid(), ctypes.addressof(value))
async def attempt(mode):
    async with LocalSandbox(SandboxLimits(), isolation=mode) as box:
        return (await box.exec(["python3", "-c", TRY], timeout=60)).out
found = {}
with python_of_all():
    for mode in ("require", "best-effort", "none"):
        try:
            found[mode] = asyncio.run(attempt(mode))
        except SandboxError as error:
            found[mode] = f"refused: {error}"
print(json.dumps({**found, "value": value.value.decode()}))
"""


@pytest.mark.parametrize("forbidden", ["namespaces and landlock", "namespaces"])
def test_programs_of_a_plain_user_do_not_write_the_memory_of_slime(forbidden: str) -> None:
    """Without Landlock the programs are slime's user: refused, or `none` is set; `/proc` is closed even then."""
    skip_unless_possible(forbidden)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", AS_A_USER, forbidden],
            capture_output=True, text=True, timeout=2 * TIME, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    if "Permission denied" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    nothing = "mem no\nenviron no\nmaps no\n"
    assert found["value"] == "HARNESS-VALUE-0001"
    assert found["require"].startswith("refused: this machine cannot isolate programs completely")
    assert found["none"] == nothing
    if "landlock" in forbidden:
        assert "could write that user's files and slime's memory" in found["best-effort"]
        assert found["best-effort"].endswith("--sandbox-isolation none")
        assert "--sandbox-isolation none" in found["require"]
    else:
        assert found["best-effort"] == nothing


def test_the_watcher_stays(box: Shared) -> None:
    assert "not permitted" in box.shell("for s in KILL STOP INT CHLD; do kill -$s $PPID; done")
    assert box.shell("echo here") == "here\n"


NO_PROGRAM_NEEDS = {
    "ptrace": "libc.ptrace(16, 1, 0, 0)", "process_vm_readv": "libc.process_vm_readv(1, 0, 0, 0, 0, 0)",
    "unshare": "libc.unshare(0x10000000)", "setns": "libc.setns(0, 0)",
    "mount": "libc.mount(b'a', b'/', b'tmpfs', 0, 0)", "chroot": "libc.chroot(b'/')",
    "memfd_create": "libc.memfd_create(b'x', 0)", "shmget": "libc.shmget(1, 4096, 0o1666)",
    "bpf": "libc.syscall(321, 0, 0, 0)", "io_uring": "libc.syscall(425, 1, 0)", "keyctl": "libc.syscall(250, 0, 0)",
    "setuid": "libc.setuid(0)", "clone": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
}  # fmt: skip


def test_calls_that_no_program_needs(box: Shared) -> None:
    tries = "\n".join(f"print({name!r}, {call}, ctypes.get_errno())" for name, call in NO_PROGRAM_NEEDS.items())
    said = box.python(f"import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n{tries}")
    assert said.splitlines() == [f"{name} -1 1" for name in NO_PROGRAM_NEEDS]


def test_a_program_with_the_bit_gives_no_rights(box: Shared) -> None:
    said = box.shell("su -c id root </dev/null; sudo -n id; newgrp root </dev/null; id")
    assert "uid=" in said
    assert "uid=0" not in said


def test_daemons_end_with_the_sandbox(mode: str) -> None:
    shared = Shared(SandboxLimits(), mode)
    marker = f"slime-test-{os.getpid()}-{time.monotonic_ns()}"
    daemon = f"""
import os, sys, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        print("up", flush=True)
        os.write(write, b"x")
        time.sleep(1000)
    os._exit(0)
os.read(read, 1)
# {marker}
"""
    try:
        assert "up" in shared.python(daemon)
        assert running(marker), "it outlives its command"
    finally:
        shared.close()
    assert not running(marker)


def running(marker: str) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if marker in Path(f"/proc/{name}/cmdline").read_text(errors="replace"):
                    found.append(name)
            except OSError:
                continue
    return found


def test_nothing_is_left_when_the_run_is_killed(mode: str) -> None:
    marker = f"slime-test-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import asyncio
from slime_sandbox_local import LocalSandbox
from tests.unit.sandboxes.local.forbidden import forbid, python_of_all
forbid({mode!r})
async def run():
    with python_of_all():
      async with LocalSandbox(isolation="best-effort") as box:
        await box.exec("setsid sh -c 'sleep 1000; : {marker}' & echo", timeout=60)
        print("up", flush=True)
        await box.exec("sleep 1000; : {marker}", timeout=2000)
asyncio.run(run())
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout:
        assert run.stdout.readline() == "up\n"
        assert running(marker)
        run.send_signal(signal.SIGKILL)
        run.wait(TIME)
    event = threading.Event()
    until = time.monotonic() + TIME
    while running(marker) and time.monotonic() < until:
        event.wait(0.05)
    assert not running(marker)


# -- too much of everything; each in a sandbox of its own, which stays usable --------------------------------


def bombed(limits: SandboxLimits, attempt: Callable[[Shared], str], mode: str = "all") -> str:
    shared = Shared(limits, mode)
    try:
        said = attempt(shared)
        assert shared.shell("echo usable") == "usable\n"
        return said
    finally:
        shared.close()


@pytest.mark.slow
def test_a_fork_bomb() -> None:
    marker = f"slime-test-{os.getpid()}-{time.monotonic_ns()}"

    def attempt(shared: Shared) -> str:
        code = f"import os\nwhile True:\n  try:\n    os.fork()\n  except OSError:\n    pass\n# {marker}"
        result = shared.do(shared.box.exec(["python3", "-c", code], timeout=1.5))
        inside = int(shared.shell("echo /proc/[0-9]* | wc -w"))
        assert inside <= 16 + 4, "the first process, and what looks"
        return str(result.code)

    assert bombed(SandboxLimits(processes=16), attempt) == "-1"
    assert not running(marker)


def test_a_thread_bomb(mode: str) -> None:
    code = """
import threading, time
try:
    for n in range(1000):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
except RuntimeError as error:
    print(n, error)
"""
    said = bombed(SandboxLimits(processes=16), lambda shared: shared.python(code), mode)
    assert "can't start new thread" in said
    assert int(said.split()[0]) < 16


def test_a_memory_bomb_of_one_and_of_many(mode: str) -> None:
    limits = SandboxLimits(memory_mb=256, processes=16)
    many = """
import os, time
for _ in range(7):
    if os.fork() == 0:
        break
x = bytearray(os.urandom(1000)) * 100_000
time.sleep(1000)
"""

    def attempt(shared: Shared) -> str:
        assert "MemoryError" in shared.python("x = bytearray(10**9)")
        return shared.python(many)

    assert "more than 256 MB of memory in use" in bombed(limits, attempt, mode)


@pytest.mark.slow
def test_a_disk_bomb(mode: str) -> None:
    fill = "dd if=/dev/zero of=one bs=1M count=100; for i in $(seq 1000); do head -c 3M /dev/zero > f$i || exit; done"
    many = "i=0; while : > n$i; do i=$((i+1)); done"

    hidden = """
import os, time
for i in range(50):
    file = os.dup(os.open("file", os.O_WRONLY | os.O_CREAT))
    os.unlink("file")
    os.write(file, bytes(3_000_000))
time.sleep(60)
"""
    deep = "import os\nwhile True: os.mkdir('d'); os.chdir('d')"

    def attempt(shared: Shared) -> str:
        said = shared.shell(fill)
        if shared.own_files:
            assert shared.shell("du -sm . | cut -f 1") == "8\n"
            shared.shell("rm *")
        assert shared.shell("ls; echo again > more; cat more") == "again\n"
        said += shared.python(hidden) + shared.shell(many)
        if not shared.own_files:
            assert "killed: more than 8 MB on disk" in shared.python(deep)
        return said

    said = bombed(SandboxLimits(disk_mb=8, file_mb=4), attempt, mode)
    assert "File too large" in said
    assert said.count("No space left") == 3 or said.count("killed: more than 8 MB on disk") == 3


def test_directories_of_everybody_are_no_further_disk(mode: str) -> None:
    """What a program makes there is counted with the rest, or cannot be made, and is gone with the sandbox."""
    name = f"slime-test-{os.getpid()}-{time.monotonic_ns()}"
    made = [Path(directory, name) for directory in ("/tmp", "/var/tmp", "/dev/shm")]
    shared = Shared(SandboxLimits(disk_mb=8, file_mb=4), mode)
    try:
        for path in made:
            said = shared.shell(
                f"mkdir {path} && for i in $(seq 100); do head -c 3M /dev/zero > {path}/$i || exit; done"
            )
            assert re.search("more than 8 MB on disk|No space left|Permission denied", said)
            assert not path.exists()
        shared.shell("; ".join(f"mkdir {path}; echo x > {path}/one" for path in made))
    finally:
        shared.close()
    assert not any(path.exists() for path in made)


@pytest.mark.slow
def test_a_cpu_bomb_that_nobody_waits_for() -> None:
    shared = Shared(SandboxLimits(cpu_seconds=1))
    try:
        assert shared.do(shared.box.exec(["python3", "-c", "while True: pass"], timeout=TIME)).code in (137, 152)
    finally:
        shared.close()
