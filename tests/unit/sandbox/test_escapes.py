"""What a program may try: each attempt is made by the program in a real sandbox, and what it got is checked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_sandbox_local import LocalSandbox, SandboxError, SandboxLimits, isolation_here

pytestmark = pytest.mark.skipif(not isolation_here().complete, reason=f"no complete isolation here: {isolation_here()}")
TIME = 60.0
SECRET = "the-secret-of-the-run"


class Shared:
    """One sandbox for the attempts that leave it whole, on a loop of its own."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.box = LocalSandbox(limits)
        self.do(self.box.__aenter__())

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


@pytest.fixture(scope="module")
def box() -> Iterator[Shared]:
    os.environ["SLIME_TEST_SECRET"] = SECRET
    shared = Shared(SandboxLimits(memory_mb=512, disk_mb=16, file_mb=4, processes=24, open_files=64))
    yield shared
    shared.close()
    del os.environ["SLIME_TEST_SECRET"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_of_the_host_are_not_there(box: Shared, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text(SECRET)
    outside.chmod(0o666)
    tmp_path.chmod(0o777)
    for path in ("/etc/shadow", str(outside), __file__, str(Path.home() / ".bashrc"), "/var/log", "/run", "/sys"):
        assert "No such file" in box.shell(f"cat {path}"), path
    attempts = f"echo x > {outside}; echo x > {tmp_path}/new; echo x > /etc/cron.d/x; echo x > /usr/bin/x; touch /lib/x"
    assert box.shell(attempts).count("cannot") >= 4
    assert outside.read_text() == SECRET
    assert os.listdir(tmp_path) == ["outside"]


@pytest.mark.parametrize("link", ["/etc/shadow", "/proc/1/root/etc/shadow", "/proc/self/root/../../etc/shadow"])
def test_a_link_leads_nowhere_else(box: Shared, link: str) -> None:
    box.shell(f"rm -f link; ln -s {link} link")
    with pytest.raises(SandboxError, match=r"No such file|Permission denied"):
        box.do(box.box.read_file("link"))


def test_a_file_written_through_a_link_stays_inside(box: Shared, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    target.chmod(0o666)
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
    assert box.shell("ls /proc/self/fd").split() == ["0", "1", "2", "3"]  # 3: the directory that `ls` lists
    denied = box.shell("ls /proc/1/fd; cat /proc/1/environ; ls /proc/1/cwd/; ls /proc/1/root/; cat /proc/1/mem")
    assert denied.count("Permission denied") == 5


def test_secrets_of_the_environment_are_not_there(box: Shared) -> None:
    assert os.environ["SLIME_TEST_SECRET"] == SECRET
    assert SECRET not in box.shell("env; cat /proc/*/environ; cat /proc/*/cmdline")


def test_shared_memory_is_its_own(box: Shared) -> None:
    mine = Path("/dev/shm") / f"slime-test-{os.getpid()}"
    mine.write_text(SECRET)
    try:
        assert box.shell("ls /dev/shm; echo x > /dev/shm/theirs; ls /dev/shm") == "theirs\n"
        assert not (mine.parent / "theirs").exists()
    finally:
        mine.unlink()


@pytest.mark.parametrize("node", ["mknod disk b 254 0", "ls /dev/vda /dev/sda /dev/mem /dev/kmsg /dev/kvm /dev/fuse"])
def test_no_devices(box: Shared, node: str) -> None:
    said = box.shell(node)
    assert "Operation not permitted" in said or said.count("No such file") == 6


# -- network -----------------------------------------------------------------------------------------------------------


def test_listeners_of_the_host_are_not_reached(box: Shared) -> None:
    name = f"\0slime-test-{os.getpid()}"
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    unix = socket.socket(socket.AF_UNIX)
    with tcp, udp, unix:
        udp.bind(("127.0.0.1", 0))
        unix.bind(name)
        unix.listen()
        for one in (tcp, udp, unix):
            one.settimeout(0.2)
        code = """
import socket, sys
for family, kind, target in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(sys.argv[1]))),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", int(sys.argv[2]))),
    (socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + sys.argv[3]),
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
        ports = tcp.getsockname()[1], udp.getsockname()[1]
        said = box.python(code, *ports, name[1:]).split()
        # A datagram to the namespace's own loopback goes nowhere, but goes.
        assert said[0] == "ConnectionRefusedError"
        assert said[2] == "ConnectionRefusedError"
        assert said[3:5] == ["OSError", "OSError"], "no route"
        assert said[5:8] == ["PermissionError"] * 3
        assert said[8] == "gaierror"
        for one, call in ((tcp, tcp.accept), (udp, lambda: udp.recv(1)), (unix, unix.accept)):
            with pytest.raises(TimeoutError):
                call()
            assert one.fileno() >= 0


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_of_the_host_are_neither_seen_nor_signalled(box: Shared) -> None:
    other = Shared(SandboxLimits())
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        other.shell("sleep 1000 & echo")
        pids = [os.getpid(), os.getppid(), victim.pid]
        said = box.shell("for p in {}; do kill -9 $p; done; kill -9 -1; echo $?".format(" ".join(map(str, pids))))
        assert said.count("No such process") + said.count("not permitted") >= 3
        assert victim.poll() is None
        assert "sleep" in other.shell("cat /proc/[0-9]*/comm")
    finally:
        victim.kill()
        victim.wait(TIME)
        other.close()


def test_the_watcher_stays(box: Shared) -> None:
    assert "not permitted" in box.shell("kill -9 1; kill -STOP 1; kill -INT 1; kill -CHLD 1")
    assert box.shell("echo here") == "here\n"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ptrace", "libc.ptrace(16, 1, 0, 0)"), ("process_vm_readv", "libc.process_vm_readv(1, 0, 0, 0, 0, 0)"),
        ("unshare", "libc.unshare(0x10000000)"), ("setns", "libc.setns(0, 0)"),
        ("mount", "libc.mount(b'a', b'/', b'tmpfs', 0, 0)"),
        ("chroot", "libc.chroot(b'/')"), ("memfd_create", "libc.memfd_create(b'x', 0)"),
        ("shmget", "libc.shmget(1, 4096, 0o1666)"), ("bpf", "libc.syscall(321, 0, 0, 0)"),
        ("io_uring", "libc.syscall(425, 1, 0)"), ("keyctl", "libc.syscall(250, 0, 0)"),
        ("setuid", "libc.setuid(0)"), ("clone", "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    ],
)  # fmt: skip
def test_calls_that_no_program_needs(box: Shared, name: str, call: str) -> None:
    code = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print({call}, ctypes.get_errno())"
    assert box.python(code) == "-1 1\n", name


def test_a_program_with_the_bit_gives_no_rights(box: Shared) -> None:
    assert "1000" in box.shell("su -c id root </dev/null; sudo -n id; id -u")
    assert "uid=0" not in box.shell("su -c id root </dev/null; sudo -n id; newgrp root </dev/null; id")


def test_daemons_end_with_the_sandbox() -> None:
    shared = Shared(SandboxLimits())
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


def test_nothing_is_left_when_the_run_is_killed() -> None:
    marker = f"slime-test-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import asyncio
from slime_sandbox_local import LocalSandbox
async def run():
    async with LocalSandbox() as box:
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


def bombed(limits: SandboxLimits, attempt: Callable[[Shared], str]) -> str:
    shared = Shared(limits)
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


def test_a_thread_bomb() -> None:
    code = """
import threading, time
try:
    for n in range(1000):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
except RuntimeError as error:
    print(n, error)
"""
    said = bombed(SandboxLimits(processes=16), lambda shared: shared.python(code))
    assert "can't start new thread" in said
    assert int(said.split()[0]) < 16


def test_a_memory_bomb_of_one_and_of_many() -> None:
    limits = SandboxLimits(memory_mb=256, processes=16)
    assert "MemoryError" in bombed(limits, lambda shared: shared.python("x = bytearray(10**9)"))
    many = """
import os, time
for _ in range(7):
    if os.fork() == 0:
        break
x = bytearray(os.urandom(1000)) * 100_000
time.sleep(1000)
"""
    assert "more than 256 MB of memory in use" in bombed(limits, lambda shared: shared.python(many))


def test_a_disk_bomb() -> None:
    limits = SandboxLimits(disk_mb=8, file_mb=4)
    fill = "dd if=/dev/zero of=one bs=1M count=100; for i in 1 2 3 4 5; do head -c 3M /dev/zero > f$i; done; du -sm ."

    def attempt(shared: Shared) -> str:
        said = shared.shell(fill + "; for i in $(seq 30000); do : > n$i || break; done 2>&1 | tail -1")
        shared.shell("rm -rf /sandbox/*")
        return said

    said = bombed(limits, attempt)
    assert "File too large" in said
    assert "No space left" in said
    assert said.count("No space left") >= 2 or "cannot create" in said


@pytest.mark.slow
def test_a_cpu_bomb_that_nobody_waits_for() -> None:
    shared = Shared(SandboxLimits(cpu_seconds=1))
    try:
        assert shared.do(shared.box.exec(["python3", "-c", "while True: pass"], timeout=TIME)).code in (137, 152)
    finally:
        shared.close()
