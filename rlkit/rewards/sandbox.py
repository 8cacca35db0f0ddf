"""Confine this process before it runs untrusted code: files by Landlock, everything else by seccomp.

The parent calls `system_calls` once, each child `confine` before it starts a thread. Neither needs privileges, both
work in a container too; it cannot be undone. Standard library only: `code_runner` imports this without rlkit.

Landlock (Linux 5.13, `man 7 landlock`) decides which files can be opened: the folder for reading and writing, Python
and the system's libraries for reading, nothing else. It does not cover system calls that take a path and open nothing
(chmod, truncate), processes, signals and most of the network. So seccomp (`libseccomp.so.2`, which apt and systemd
bring along) allows the system calls that Python and numeric libraries need, and no others: an allow-list, because the
list of what can do harm grows with every kernel. Not used: bubblewrap and mount namespaces, which many containers and
clusters forbid.

What stays possible: to see that a file exists, with its size and owner (stat); to read Python's folder and /usr.
"""

import ctypes
import functools
import os
import sys

READABLE = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, "/usr", "/lib", "/lib64"]
READABLE += ["/nix/store", "/gnu/store", "/sys/devices/system/cpu", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat"]
READABLE += [f"/etc/{name}" for name in ("passwd", "group", "hosts", "nsswitch.conf", "localtime", "timezone")]
READABLE += [f"/etc/{name}" for name in ("ld.so.cache", "mime.types", "os-release", "locale.alias")]
READABLE += ["/dev/urandom", "/dev/random", "/dev/zero"]

# linux/landlock.h. Rights of the first version are bits 0 to 12, then REFER (2), TRUNCATE (3), IOCTL_DEV (5).
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
DEVICES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 15  # character devices, sockets, FIFOs, block devices, their ioctl
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
NO_NEW_PRIVILEGES, SET_SECCOMP = 38, 22  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP

ALLOWED = """
access faccessat faccessat2 chdir fchdir close close_range copy_file_range dup dup2 dup3 fadvise64 fdatasync fsync fstat
fstatfs ftruncate getcwd getdents getdents64 getxattr fgetxattr lgetxattr listxattr flistxattr llistxattr lseek lstat
newfstatat pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readlink readlinkat readv rename renameat
renameat2 rmdir sendfile stat statfs statx symlink symlinkat unlink unlinkat write writev
brk madvise membarrier mincore mmap mprotect mremap msync munmap
futex futex_wait futex_waitv futex_wake futex_requeue get_robust_list getcpu gettid rseq sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler sched_yield set_robust_list set_tid_address
alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep pause setitimer time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times
restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sigaltstack
signalfd signalfd4 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pipe pipe2
poll ppoll pselect6 select getpeername getsockname getsockopt recvfrom recvmsg shutdown
exit exit_group getegid geteuid getgid getgroups getpgid getpgrp getpid getpriority getppid getrandom getresgid
getresuid getrlimit getrusage getsid getuid sysinfo uname wait4 waitid
"""
PRETENDED = "chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat"  # shutil.copy fails if these do
MASKED = 7  # SCMP_CMP_MASKED_EQ of seccomp.h
ALL, INT = (1 << 64) - 1, (1 << 32) - 1  # masks: an argument of 64 bits, of 32
ALLOW, NO_SYSTEM_CALL, PRETEND = 0x7FFF0000, 0x00050000 | 38, 0x00050000  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(ENOSYS), (0)
THREAD, ACCESS = 0x00010000, 0o3  # CLONE_THREAD, O_ACCMODE


class _Comparison(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


class _Program(ctypes.Structure):  # struct sock_fprog
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def confine(filter_program: bytes, folder: str = ".") -> list[str]:
    """Restrict this process permanently to its folder, Python's files, threads and arithmetic.

    Args:
        filter_program: from `system_calls`; empty where there is none.
        folder: the only one in which it may write.

    Returns:
        What this machine does not protect: of "files" and "system calls"; empty if all is well.

    Raises:
        OSError: the kernel has what is needed and refuses it.
    """
    if not sys.platform.startswith("linux"):
        return ["files", "system calls"]
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    missing = [] if _restrict_files(libc, folder) else ["files"]
    if not filter_program:
        return [*missing, "system calls"]
    program = _Program(len(filter_program) // 8, filter_program)
    if libc.prctl(SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
        missing.append("system calls")
    return missing


def _restrict_files(libc: ctypes.CDLL, folder: str) -> bool:
    """Landlock; False where the kernel has none."""
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    handled = RIGHTS[min(version, max(RIGHTS))]
    attributes = ctypes.c_uint64(handled)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    rules = _checked(libc.syscall(CREATE_RULESET, ctypes.byref(attributes), size, 0), "landlock_create_ruleset")
    reading = READ_FILE | READ_DIR
    allowed = dict.fromkeys(READABLE, reading) | {"/dev/null": READ_FILE | WRITE_FILE | TRUNCATE}
    for path, rights in (allowed | {folder: handled & ~DEVICES & ~EXECUTE}).items():
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= READ_FILE | WRITE_FILE | TRUNCATE
        number = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathRule(rights & handled, number)
        _checked(libc.syscall(ADD_RULE, rules, 1, ctypes.byref(rule), 0), f"landlock_add_rule({path})")
        os.close(number)
    _checked(libc.syscall(RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return True


@functools.cache
def system_calls() -> bytes:
    """The system calls that are allowed, as a program for the kernel's filter (`struct sock_filter`, 8 bytes each).

    Takes 10 ms; made by the parent, for all its children. Empty where libseccomp is missing.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return b""
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(NO_SYSTEM_CALL)))

    def rule(name: str, *comparisons: tuple[int, int, int], action: int = ALLOW) -> None:
        """Allow a call, where each (argument, mask, value) fits."""
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:  # this libseccomp does not know it
            return
        array = (_Comparison * len(comparisons))(
            *(_Comparison(argument, MASKED, mask, value) for argument, mask, value in comparisons)
        )
        library.seccomp_rule_add_array(rules, ctypes.c_uint32(action), number, len(comparisons), array)

    for name in ALLOWED.split():
        rule(name)
    for name in PRETENDED.split():
        rule(name, action=PRETEND)
    rule("clone", (0, THREAD, THREAD))  # clone3 is unknown, so libc takes clone, whose flags can be checked
    for name, flags in (("open", 1), ("openat", 2)):
        rule(name, (flags, os.O_TRUNC, 0))
        for mode in (os.O_WRONLY, os.O_RDWR):  # Landlock before version 3 let O_RDONLY | O_TRUNC empty a file
            rule(name, (flags, ACCESS, mode))
    owner = 0o700  # of every new folder: what its owner cannot look into is not counted, and stays when all is removed
    for name, argument in (("mkdir", 1), ("mkdirat", 2)):
        rule(name, (argument, owner, owner))
    rule("umask", (0, owner, 0))
    rule("socketpair", (0, INT, 1))  # AF_UNIX, for asyncio
    rule("sendto", (4, ALL, 0))  # to the other end of it, not to an address
    rule("prlimit64", (0, INT, 0), (2, ALL, 0))  # reads; writes only the size of the stack
    rule("prlimit64", (0, INT, 0), (1, INT, 3))
    for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451):  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, ...
        rule("ioctl", (1, INT, request))
    for command in (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030):  # not F_SETOWN, which sends signals to other processes
        rule("fcntl", (1, INT, command))
    for option in (15, 16):  # PR_SET_NAME, PR_GET_NAME
        rule("prctl", (0, INT, option))
    with open(os.memfd_create("filter"), "rb") as file:
        written = library.seccomp_export_bpf(rules, file.fileno()) == 0
        library.seccomp_release(rules)
        file.seek(0)
        return file.read() if written else b""


def _checked(result: int, name: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"sandbox: {name}: {os.strerror(ctypes.get_errno())}")
    return result
