from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import slime_sandbox_local
from slime_sandbox_local import LocalSandbox, Sandbox, SandboxError, SandboxLimits, isolation_here
from slime_sandbox_local.inside import landlock

import slime_core
from tests.unit.sandboxes.local.forbidden import forbid, python_of_all

pytestmark = pytest.mark.skipif(not isolation_here().complete, reason=f"no complete isolation here: {isolation_here()}")
TIME = 60.0


@pytest.fixture
async def box() -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox() as opened:
        yield opened


async def test_a_command_its_status_and_both_outputs(box: LocalSandbox) -> None:
    assert isinstance(box, Sandbox)
    code, out, err = await box.exec("echo a; echo b >&2; exit 3", timeout=TIME)
    assert (code, out, err) == (3, "a\n", "b\n")
    assert (await box.exec(["printf", "%s", "a b"], timeout=TIME)).out == "a b"
    assert (await box.exec("kill -TERM $$", timeout=TIME)).code == 128 + 15
    assert (await box.exec(["no-such-program"], timeout=TIME)).code == 127
    assert (await box.exec("pwd; echo $HOME; id -un", timeout=TIME)).out == "/sandbox\n/sandbox\nsandbox\n"


async def test_environment_is_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with LocalSandbox(env={"A": "1"}) as box:
        assert (await box.exec("echo $A$B$HF_TOKEN", env={"B": "2"}, timeout=TIME)).out == "12\n"


async def test_files_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(bytes(range(256)) * 4000)
    async with LocalSandbox(SandboxLimits(file_mb=2)) as box:
        await box.write_file("deep/er/text", "caf\u00e9")
        assert await box.read_file("/sandbox/deep/er/text") == "caf\u00e9".encode()
        await box.write_file("bytes", tmp_path / "local")
        assert await box.read_file("bytes") == bytes(range(256)) * 4000
        assert (await box.exec("wc -c < bytes", timeout=TIME)).out.strip() == "1024000"
        await box.write_file("bytes", b"")
        assert await box.read_file("bytes") == b""
        with pytest.raises(SandboxError, match=r"cannot read nothing in the sandbox: .*No such file"):
            await box.read_file("nothing")
        with pytest.raises(SandboxError, match="cannot write /usr/x in the sandbox"):
            await box.write_file("/usr/x", "")
        with pytest.raises(SandboxError, match="larger than 2 MB"):
            await box.read_file("/dev/zero")


@pytest.mark.slow
async def test_time_is_up_and_the_tree_goes(box: LocalSandbox) -> None:
    # The shell must start within it as well.
    result = await box.exec("echo begun; (sleep 1000 & sleep 1000); echo over", timeout=6.0)
    assert result.timed_out
    assert result.out == "begun\n"
    assert "sleep" not in (await box.exec("cat /proc/[0-9]*/comm", timeout=TIME)).out


async def test_a_command_is_over_though_its_child_holds_the_output(box: LocalSandbox) -> None:
    assert (await box.exec("sleep 1000 & echo done", timeout=TIME)).out == "done\n"


@pytest.mark.slow
async def test_endless_output_is_cut() -> None:
    async with LocalSandbox(SandboxLimits(output_kb=1)) as box:
        result = await box.exec("yes", timeout=6.0)
        assert result.timed_out
        assert result.out.endswith("[cut: more output than the sandbox keeps]")
        assert 1024 <= len(result.out) <= 1100


async def test_an_endpoint_is_reached_and_nothing_else_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"from outside: " + connection.recv(100))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        host_port = server.getsockname()[1]
        talk = (
            "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10);"
            " s.sendall(b'hello'); print(s.recv(100).decode())"
        )

        async with LocalSandbox(SandboxLimits(endpoints={8000: ("127.0.0.1", host_port)})) as box:
            assert (await box.exec(["python3", "-c", talk, "8000"], timeout=TIME)).out == "from outside: hello\n"
            for other in (host_port, 8001):
                assert "ConnectionRefused" in (await box.exec(["python3", "-c", talk, str(other)], timeout=TIME)).err
        thread.join(TIME)
    with pytest.raises(SandboxError, match="no use"):
        LocalSandbox(SandboxLimits(network=True, endpoints={1: ("a", 2)}))


async def test_further_directories_are_read_only(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("seen")
    tmp_path.chmod(0o755)  # the program is nobody whom the owner knows
    async with LocalSandbox(SandboxLimits(read_only=(str(tmp_path),))) as box:
        assert (await box.exec(f"cat {tmp_path}/data", timeout=TIME)).out == "seen"
        assert (await box.exec(f"echo x > {tmp_path}/data; rm {tmp_path}/data", timeout=TIME)).code != 0
    assert (tmp_path / "data").read_text() == "seen"


async def test_who_waits_is_told_when_it_ends() -> None:
    async with LocalSandbox() as box:
        command = asyncio.create_task(box.exec("sleep 1000", timeout=TIME))
        await box.exec("true", timeout=TIME)
        await box.close()
        with pytest.raises(SandboxError, match="has been closed"):
            await command


def test_cancelled_while_starting_running_and_ending() -> None:
    async def run() -> None:
        for turns in (1, 3):
            box = LocalSandbox()
            start = asyncio.create_task(box.__aenter__())
            for _ in range(turns):
                await asyncio.sleep(0)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
        async with LocalSandbox() as box:
            command = asyncio.create_task(box.exec("sleep 1000", timeout=TIME))
            await box.exec("true", timeout=TIME)
            command.cancel()
            with pytest.raises(asyncio.CancelledError):
                await command
            end = asyncio.create_task(box.close())
            await asyncio.sleep(0)
            end.cancel()
            with pytest.raises(asyncio.CancelledError):
                await end

    asyncio.run(run())  # its end joins the threads that started and ended them
    assert_no_keepers(os.getpid())


def keepers(parent: int) -> list[int]:
    """Children of a process that are keepers and have not ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                status = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                command = Path(f"/proc/{name}/cmdline").read_text()
            except OSError:
                continue
            if int(status[1]) == parent and status[0] != "Z" and "slime_sandbox_local.inside" in command:
                found.append(int(name))
    return found


def assert_no_keepers(parent: int) -> None:
    event = threading.Event()
    for _ in range(600):
        if not keepers(parent):
            return
        event.wait(0.1)
    raise AssertionError(f"left behind: {keepers(parent)}")


NESTED = """
import asyncio, logging, sys
sys.path[:0] = sys.argv[1:]
from slime_sandbox_local import LocalSandbox, SandboxLimits
logging.basicConfig(stream=sys.stdout)
"""
PACKAGES = [str(Path(module.__file__ or "").parents[1]) for module in (slime_core, slime_sandbox_local)]
NOT_ROOT = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", "/usr/bin/python3"]
ONE_USER = ["unshare", "--user", "--map-root-user", sys.executable]
NO_NAMESPACES = [
    "unshare", "--user", "--map-root-user", "sh", "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"', sys.executable,
]  # fmt: skip


def as_another(command: list[str], body: str) -> str:
    """Standard output of a program under other rights than this one's."""
    done = subprocess.run(
        [*command, "-c", NESTED + body, *PACKAGES], capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _runs(command: list[str]) -> bool:
    try:
        done = subprocess.run([*command, "-c", "import enum; enum.StrEnum"], capture_output=True, timeout=60, cwd="/")
    except OSError:
        return False
    return done.returncode == 0 and os.geteuid() == 0


@pytest.mark.parametrize("command", [NOT_ROOT, ONE_USER], ids=["another user", "users cannot be mapped"])
def test_a_user_who_is_not_root_and_root_of_one_user(command: list[str]) -> None:
    if not _runs(command):
        pytest.skip("cannot become another user here, no user namespaces, or /usr/bin/python3 is not 3.11")
    body = """
async def run():
    async with LocalSandbox(SandboxLimits(processes=8)) as box:
        print(await box.exec("id -u; grep CapEff /proc/self/status; kill -9 1; cat /proc/1/environ", timeout=60))
        print(await box.exec("for i in 1 2 3 4 5 6 7 8 9; do sleep 100 & done; wait", timeout=60))
asyncio.run(run())
"""
    few, more = as_another(command, body).splitlines()
    assert "out='1000\\nCapEff:\\t0000000000000000\\n'" in few
    assert "Permission denied" in few
    assert "fork" in more or "more than 8 processes and threads" in more


def entered(mode: str, isolation: str = "best-effort") -> dict[str, str]:
    """What a sandbox lacks that is made in a thread that may not do all."""

    async def inside() -> dict[str, str]:
        async with LocalSandbox(isolation=isolation) as box:
            return box.missing

    with ThreadPoolExecutor(1) as thread:
        thread.submit(forbid, mode).result()
        isolation_here.cache_clear()
        try:
            return thread.submit(lambda: asyncio.run(inside())).result()
        finally:
            isolation_here.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs become another user")
def test_without_namespaces_it_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    with python_of_all():
        with pytest.raises(SandboxError) as refused:
            entered("namespaces", "require")
        assert "this machine cannot isolate programs completely: no user namespace (" in str(refused.value)
        assert "--sandbox-isolation best-effort" in str(refused.value)
        assert list(entered("namespaces")) == ["user namespace"]
        assert "sandboxes on this machine are not complete" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs become another user")
@pytest.mark.parametrize("isolation", ["require", "best-effort"])
def test_root_whose_programs_would_stay_root_is_refused(isolation: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with python_of_all(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "base_prefix", str(tmp_path))
        with pytest.raises(SandboxError, match=r"must not run as root here, .* `chmod o\+x /.*`, take a"):
            entered("namespaces", isolation)
    if _runs(NO_NAMESPACES):  # a container with one user
        command = [*NO_NAMESPACES[:-1], "/usr/bin/python3"]
        body = f"asyncio.run(LocalSandbox(isolation={isolation!r}).__aenter__())"
        done = subprocess.run([*command, "-c", NESTED + body, *PACKAGES], capture_output=True, text=True, cwd="/")
        assert "root may not become another user" in done.stderr


async def test_a_program_whose_output_must_be_whole_is_ended_when_it_is_too_long() -> None:
    async with LocalSandbox(SandboxLimits(output_kb=4, stack_mb=24), isolation="best-effort") as box:
        asked = {"op": "exec", "command": ["/bin/sh", "-c", "ulimit -s; yes"], "whole": True}
        answer, body = await box.request(asked, what="yes", timeout=30.0)
        assert answer["cut"] == ["out"]
        assert answer["code"] == 128 + 9
        assert body.startswith(b"24576\ny\n")


async def test_check_and_user(box: LocalSandbox) -> None:
    with pytest.raises(SandboxError, match="ended with 1: why"):
        await box.exec("echo why >&2; false", timeout=TIME, check=True)
    with pytest.raises(SandboxError, match="has one user, 'sandbox'"):
        await box.exec("true", user="root", timeout=TIME)


@pytest.mark.parametrize(("version", "lacking"), [(2, ["truncation", "signals"]), (5, ["signals"]), (6, [])])
def test_what_an_old_landlock_lacks_is_said(version: int, lacking: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: version)
    said = landlock.lacks(same_user=True)
    assert len(said) == len(lacking)
    assert all(word in what and f"version {version}" in said[what] for word, what in zip(lacking, said))
