"""The filter of system calls that every program of a sandbox runs under: a denial for what none of them needs.

`rights.py` installs it. Denied are calls that reach other processes, mounts, namespaces, the kernel itself, memory that
no limit counts (memfd, System V), sockets of families that nothing separates from the host's (vsock, among others), and
io_uring, which would get around the filter. A denied call fails with EPERM as for lack of rights, it does not end the
program; `clone3` is ENOSYS, at which C libraries use `clone`, whose flags the filter can read.
"""

from __future__ import annotations

import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEW* of all kinds
_UNIX, _INTERNET = (1,), (2, 10)
"""AF_UNIX; AF_INET and AF_INET6."""

_DENIED = {
    # name: (x86_64, aarch64)
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "quotactl": (179, 60),
}  # fmt: skip
_ONLY_X86 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST = 0x15, 0x35
_ALLOW, _ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000, 1, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def filter_program(*, ip_sockets: bool, unix_sockets: bool) -> bytes:
    """BPF instructions.

    Args:
        ip_sockets: Leave Internet sockets; False for want of a network namespace.
        unix_sockets: Leave Unix sockets; False where those of the host have a path or name here. Pairs are left.

    Raises:
        OSError: The filter is not known for this architecture.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(0, f"no filter of system calls for {machine}")
    column = ("x86_64", "aarch64").index(machine)
    denied = [numbers[column] for numbers in _DENIED.values()]
    if machine == "x86_64":
        denied += _ONLY_X86.values()
    families = (*(_UNIX if unix_sockets else ()), *(_INTERNET if ip_sockets else ()))
    code = [_word(_LOAD, _ARCHITECTURE), *_unless_equal(_AUDIT_ARCH[machine]), _word(_LOAD, _NUMBER)]
    if machine == "x86_64":  # the x32 numbers name the same calls once more
        code += [_word(_JUMP_AT_LEAST, 0x40000000, 0, 1), _fail(_EPERM)]
    for number in denied:
        code += [_word(_JUMP_EQUAL, number, 0, 1), _fail(_EPERM)]
    code += [_word(_JUMP_EQUAL, _CLONE3, 0, 1), _fail(_ENOSYS)]
    flags = [_word(_LOAD, _FIRST_ARGUMENT), _word(_AND, _NAMESPACE_FLAGS), *_unless_equal(0), _word(_RETURN, _ALLOW)]
    code += [_word(_JUMP_EQUAL, _CLONE[machine], 0, len(flags)), *flags]
    for number, allowed in ((_SOCKET[machine], families), (_SOCKETPAIR[machine], (*_UNIX, *families))):
        tests = [_word(_JUMP_EQUAL, family, len(allowed) - i, 0) for i, family in enumerate(allowed)]
        check = [_word(_LOAD, _FIRST_ARGUMENT), *tests, _fail(_EPERM), _word(_RETURN, _ALLOW)]
        code += [_word(_JUMP_EQUAL, number, 0, len(check)), *check]
    return b"".join([*code, _word(_RETURN, _ALLOW)])


def _word(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _word(_RETURN, _ERRNO | number)


def _unless_equal(value: int) -> list[bytes]:
    """EPERM unless the accumulator holds `value`."""
    return [_word(_JUMP_EQUAL, value, 1, 0), _fail(_EPERM)]
