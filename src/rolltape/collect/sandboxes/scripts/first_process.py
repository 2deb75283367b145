"""The first process inside a sandbox: it gives up privileges, passes a listener to the collector, and runs a program.

It runs as a script with only the standard library, as process 1 of its process namespace: when it ends, the kernel
ends all other processes in the namespace. Its arguments are a Unix socket (a descriptor) to the collector, the user to
become (0: it is that user already), the port to listen on (0: none), and the command. The collector itself accepts the
connections of the listener, so no relay runs inside that an agent could stop.
"""

import ctypes
import errno
import json
import os
import platform
import signal
import socket
import struct
import sys
import threading
import time

# Of linux/prctl.h, linux/capability.h and linux/seccomp.h.
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 0x10000000
# Of linux/bpf_common.h: load a word, jump if equal, jump if any bit is set, jump if greater or equal, return.
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in a filter's input
_X32 = 0x40000000  # call numbers of the other table (x32) begin here
# By machine: the kernel's number of the architecture, clone, unshare, and calls that no program needs: add_key,
# request_key and keyctl (they reach the collector's keyring), perf_event_open, bpf, userfaultfd, io_uring_setup.
_CALLS = {
    "x86_64": (0xC000003E, 56, 272, (248, 249, 250, 298, 321, 323, 425)),
    "aarch64": (0xC00000B7, 220, 97, (217, 218, 219, 241, 280, 282, 425)),
}
_ORPHAN_S = 10.0  # longer than a supervisor takes to end the program
_CLONE3 = 435  # its flags are in memory, which a filter cannot read; the C library falls back to clone


def give_up_privileges(user: int) -> None:
    """Become an ordinary user without capabilities, permanently."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if user:
        for capability in range(64):
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
    refuse_calls(libc)


def refuse_calls(libc: ctypes.CDLL) -> None:
    """Refuse user namespaces, in which a program would regain capabilities, and calls that attacks often use."""
    if platform.machine() not in _CALLS:
        return
    architecture, clone, unshare, never = _CALLS[platform.machine()]
    refused, unknown = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    rules = [
        _rule(_LOAD, _ARCHITECTURE),
        _rule(_EQUAL, architecture, 1, 0),
        _rule(_RETURN, unknown),
        _rule(_LOAD, _NUMBER),
        _rule(_AT_LEAST, _X32, 0, 1),
        _rule(_RETURN, unknown),
        _rule(_EQUAL, _CLONE3, 0, 1),
        _rule(_RETURN, unknown),
    ]
    for call in never:
        rules += [_rule(_EQUAL, call, 0, 1), _rule(_RETURN, refused)]
    rules += [
        _rule(_EQUAL, clone, 1, 0),
        _rule(_EQUAL, unshare, 0, 3),
        _rule(_LOAD, _FIRST_ARGUMENT),
        _rule(_ANY_BIT, _CLONE_NEWUSER, 0, 1),
        _rule(_RETURN, refused),
        _rule(_RETURN, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(rules), 8 * len(rules))
    program = struct.pack("@HP", len(rules), ctypes.addressof(code))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def _rule(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def run(channel: socket.socket, command: list[str]) -> int:
    """Run the command, reap ended processes, and return the command's status from waitpid."""
    program = os.fork()
    if not program:
        try:
            for name in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(name, signal.SIG_DFL)
            os.execvp(command[0], command)
        except OSError as error:
            channel.send(json.dumps({"error": f"{command[0]}: {error.strerror}"}).encode())
        finally:
            os._exit(127)
    threading.Thread(target=end_with_collector, args=(channel,), daemon=True).start()
    while True:
        ended, status = os.wait()
        if ended == program:
            return status


def end_with_collector(channel: socket.socket) -> None:
    """End the sandbox some time after the collector has died, in case its supervisor was killed too.

    bwrap would end with its parent, but its signal does not reach a process of another user.
    """
    channel.recv(1)  # the collector sends nothing: this returns when its end is closed
    time.sleep(_ORPHAN_S)
    os._exit(1)


def main() -> None:
    descriptor, user, port, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)
    try:
        if int(port):
            with socket.create_server(("127.0.0.1", int(port))) as listener:
                socket.send_fds(channel, [b"{}"], [listener.fileno()])
        give_up_privileges(int(user))
        # Other processes in the sandbox must not read this one's memory, since it holds the channel.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        report: dict[str, int | str] = {"status": run(channel, command)}
    except OSError as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    channel.send(json.dumps(report).encode())


if __name__ == "__main__":
    main()
