"""Emulated virtual machines for the ssh cluster on one Linux machine, as root; nothing is left running afterwards.

    python scripts/vm_lab.py DIR [--hosts N] [--cpus N] [--memory-mb N] [--add PATH] -- COMMAND ...

The first time, mmdebstrap builds a Debian in DIR (a kernel, systemd, sshd), which scripts/provision.sh provisions; this
takes a few minutes and 1 GB. Each machine n1, n2, ... is an emulating qemu (KVM is neither needed nor used), with its
own disk layered over that Debian's, on a bridge in a network namespace. Once the user vagrant can log in to all of
them, COMMAND runs in that namespace, and DIR/ssh-config, in the format of `vagrant ssh-config`, describes how to reach
them; when COMMAND ends, the machines are switched off. `--add PATH` copies a file or directory of this machine into the
image, under the same path, and rebuilds the image.

Needs the packages qemu-system-x86, qemu-utils, mmdebstrap, e2fsprogs and openssh-client.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["main", "missing", "vm_lab"]

LAB = runpy.run_path(str(Path(__file__).with_name("lab.py")), run_name="lab")
_namespace, _daemon, _run, _run_inside = LAB["_namespace"], LAB["_daemon"], LAB["_run"], LAB["_run_inside"]

NEEDS = {
    "qemu-system-x86_64": "qemu-system-x86", "qemu-img": "qemu-utils", "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs", "ssh-keygen": "openssh-client", "ip": "iproute2", "nsenter": "util-linux",
}  # fmt: skip
PACKAGES = (
    "linux-image-cloud-amd64", "initramfs-tools", "systemd-sysv", "udev", "dbus", "kmod", "openssh-server", "sudo",
    "python3",
)  # fmt: skip
"""Packages that make the root file system bootable. scripts/provision.sh installs the rest."""

SUBNET = "10.79.0"
USER = "vagrant"
DISK_BYTES = 6 << 30
BOOT_TIMEOUT_S = 600.0
"""Until a user can log in to an emulated machine; half a minute each when nothing else runs."""

# The address comes from the kernel's command line, so that one image serves all machines.
_FIRST_STEPS = """#!/bin/sh
set -e
for word in $(cat /proc/cmdline); do
    case $word in lab.address=*) address=${word#*=} ;; esac
done
device=$(ls /sys/class/net | grep -v '^lo$' | head -n 1)
ip link set "$device" up
ip address add "$address/24" dev "$device"
grep -qw "$(uname -n)" /etc/hosts || echo "127.0.1.1 $(uname -n)" >>/etc/hosts
[ -e /etc/ssh/lab_key ] || ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/lab_key
"""
_UNIT = """[Unit]
Before=ssh.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/lab-first-steps
[Install]
WantedBy=multi-user.target
"""
_SSHD = "HostKey /etc/ssh/lab_key\nUseDNS no\nUsePAM no\n"


def missing() -> str | None:
    """What this machine lacks for a laboratory of virtual machines, in one line; None if it has everything."""
    if os.geteuid() != 0:
        return "needs root"
    found = {program for program in NEEDS if shutil.which(program, path=LAB["_PATH"]) is not None}
    packages = sorted({package for program, package in NEEDS.items() if program not in found})
    return f"missing packages: {' '.join(packages)}" if packages else None


def _build(directory: Path, added: Sequence[Path]) -> None:
    """Make `base.img`, `kernel` and `initrd` in `directory`."""
    root = directory / "rootfs"
    if not (root / "boot").is_dir():
        shutil.rmtree(root, ignore_errors=True)
        include = f"--include={','.join(PACKAGES)}"
        _run("mmdebstrap", "--mode=root", "--variant=minbase", include, "bookworm", str(root))
    with open(Path(__file__).with_name("provision.sh"), "rb") as script:
        make_user = f"id {USER} >/dev/null 2>&1 || useradd --create-home --shell /bin/bash --password '*' {USER}"
        subprocess.run(["chroot", str(root), "sh", "-ec", make_user], check=True)
        shutil.copy2("/etc/resolv.conf", root / "etc" / "resolv.conf")
        provision = ["chroot", str(root), "sh", "-s", "--", "--sudo", USER, "--own-clock"]
        subprocess.run(provision, stdin=script, check=True)
    keys = root / "home" / USER / ".ssh"
    keys.mkdir(mode=0o700, exist_ok=True)
    shutil.copy2(directory / "id.pub", keys / "authorized_keys")
    steps = root / "usr" / "local" / "sbin" / "lab-first-steps"
    steps.write_text(_FIRST_STEPS)
    steps.chmod(0o755)
    (root / "etc" / "systemd" / "system" / "lab-first-steps.service").write_text(_UNIT)
    (root / "etc" / "ssh" / "sshd_config.d" / "lab.conf").write_text(_SSHD)
    setting_up = (
        f"chown -R {USER}: /home/{USER}/.ssh; systemctl enable lab-first-steps ssh; rm -f /etc/ssh/ssh_host_*; "
        "systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer"
    )
    subprocess.run(["chroot", str(root), "sh", "-ec", setting_up], check=True, capture_output=True)
    for path in added:
        inside = root / str(path.resolve()).lstrip("/")
        shutil.rmtree(inside, ignore_errors=True)
        inside.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, inside, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        else:
            shutil.copy2(path, inside)
    for kind, name in (("vmlinuz", "kernel"), ("initrd.img", "initrd")):
        shutil.copy2(max((root / "boot").glob(f"{kind}-*")), directory / name)
    image = directory / "base.img"
    image.unlink(missing_ok=True)
    with open(image, "wb") as file:
        os.truncate(file.fileno(), DISK_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-L", "lab", "-d", str(root), str(image))


@contextlib.contextmanager
def vm_lab(
    directory: Path, host_count: int, *, cpus: int = 1, memory_mb: int = 512, added: Sequence[Path] = ()
) -> Iterator[tuple[list[str], Path]]:
    """Machines n1..nN; yields the prefix of a command that reaches them, and the path of their SSH configuration.

    Raises RuntimeError when one does not start.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "id").exists():
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "id"))
    if added or not (directory / "base.img").exists():
        _build(directory, added)
    net = f"sb-lab-{os.getpid()}-net"
    (directory / "known_hosts").unlink(missing_ok=True)  # the machines are new every time
    config = []
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(_namespace(net))
        lines = ["link add br0 type bridge", f"address add {SUBNET}.254/24 dev br0", "link set br0 up"]
        lines += [f"tuntap add n{number} mode tap" for number in range(1, host_count + 1)]
        lines += [f"link set n{number} master br0 up" for number in range(1, host_count + 1)]
        subprocess.run(["ip", "-netns", net, "-batch", "-"], input="\n".join(lines), text=True, check=True)
        machines = []
        for number in range(1, host_count + 1):
            host, address = f"n{number}", f"{SUBNET}.{10 + number}"
            disk = directory / f"{host}.qcow2"
            base = str((directory / "base.img").resolve())
            _run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, str(disk))
            command_line = (
                f"root=/dev/vda rw quiet console=ttyS0 net.ifnames=0 systemd.hostname={host} lab.address={address}"
            )
            argv = [
                "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max",
                "-smp", str(cpus), "-m", str(memory_mb), "-display", "none", "-monitor", "none", "-no-reboot",
                "-serial", f"file:{directory / host}.console",
                "-kernel", str(directory / "kernel"), "-initrd", str(directory / "initrd"), "-append", command_line,
                "-drive", f"file={disk},if=virtio,cache=unsafe",
                "-netdev", f"tap,id=net0,ifname={host},script=no,downscript=no",
                "-device", f"virtio-net-pci,netdev=net0,mac=52:54:00:79:00:{number:02x}", "-device", "virtio-rng-pci",
            ]  # fmt: skip
            machines.append(stack.enter_context(_daemon([*prefix, *argv], directory / f"{host}.log")))
            config += [
                f"Host {host}", f"  HostName {address}", f"  User {USER}", "  Port 22",
                f"  IdentityFile {directory / 'id'}", "  StrictHostKeyChecking accept-new",
                f"  UserKnownHostsFile {directory / 'known_hosts'}", "",
            ]  # fmt: skip
        (directory / "ssh-config").write_text("\n".join(config))
        for number, machine in enumerate(machines, 1):
            _wait_for_login(prefix, directory, f"n{number}", machine)
        yield prefix, directory / "ssh-config"


def _wait_for_login(prefix: Sequence[str], directory: Path, host: str, machine: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    ssh = [*prefix, "ssh", "-F", str(directory / "ssh-config"), "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", host]
    while subprocess.run([*ssh, "true"], capture_output=True, check=False).returncode != 0:
        if machine.poll() is not None or time.monotonic() > deadline:
            log = (directory / f"{host}.log").read_text(errors="replace")[-500:]
            raise RuntimeError(f"nobody can log in to {host} (see {directory / host}.console): {log}")
        time.sleep(2)


def main(arguments: list[str]) -> int:
    """Run a command in the laboratory; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="machines (default: 3)")
    parser.add_argument("--cpus", type=int, default=1, metavar="N", help="processors of each (default: 1)")
    parser.add_argument("--memory-mb", type=int, default=512, metavar="N", help="memory of each (default: 512)")
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="PATH", help="copy it into the image")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command_words = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    problem = missing()
    if problem is not None:
        print(f"vm_lab: {problem}", file=sys.stderr)
        return 254
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that every `finally` runs
    shell = command_words or [os.environ.get("SHELL", "/bin/sh")]
    try:
        with vm_lab(
            options.directory.resolve(), options.hosts, cpus=options.cpus, memory_mb=options.memory_mb,
            added=options.add,
        ) as (prefix, _):  # fmt: skip
            return int(_run_inside([*prefix, *shell], {}))
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"vm_lab: {error}", file=sys.stderr)
        return 255


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
