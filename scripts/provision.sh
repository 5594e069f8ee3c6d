#!/bin/sh
# Install what the harness needs on a host to run replicas and faults. For containers, virtual machines and any Debian
# or Ubuntu host that an inventory names; run as root. Running it again does nothing.
#
#     provision.sh [--sudo USER] [--own-clock]
#
#   --sudo USER    let USER run commands as root without a password, which the harness needs if it logs in as USER
#   --own-clock    stop and disable whatever sets the host's clock, as it would undo clock faults; for machines that
#                  exist to be broken
#
# Installs only packages that are missing, so a host that has them needs no network.
set -eu

PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
sudo_user=
own_clock=

fail() {
    echo "provision: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --sudo)
            [ $# -ge 2 ] || fail "--sudo needs a user's name"
            sudo_user=$2
            shift 2
            ;;
        --own-clock)
            own_clock=yes
            shift
            ;;
        *) fail "unknown option $1; known: --sudo USER, --own-clock" ;;
    esac
done
[ "$(id -u)" -eq 0 ] || fail "must run as root: sudo $0"

# program:package. Python runs the replica and the agent; nft and tc make partitions and link faults; the rest is for
# disk and process faults.
missing=
for pair in python3:python3 nft:nftables ip:iproute2 tc:iproute2 ps:procps mkfs.ext4:e2fsprogs fsfreeze:util-linux \
    losetup:mount; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -z "$sudo_user" ] || command -v sudo >/dev/null 2>&1 || missing="$missing sudo"

if [ -n "$missing" ]; then
    command -v apt-get >/dev/null 2>&1 || fail "install these with the host's package manager:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt() {
        apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=1 "$@" </dev/null
    }
    # Package lists may be stale or absent: try the present ones before fetching new ones.
    # shellcheck disable=SC2086 # several words are several packages
    apt install --yes --no-install-recommends $missing >/dev/null 2>&1 ||
        { apt update && apt install --yes --no-install-recommends $missing; } >/dev/null ||
        fail "could not install:$missing (is a package mirror reachable?)"
fi

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$(python3 --version) is too old, 3.11 or newer is needed: set another with python = in the inventory"
python3 -c 'import http.client, ctypes, asyncio' ||
    fail "python3 lacks part of its standard library (python3-minimal?): apt-get install python3"

if [ -n "$sudo_user" ]; then
    id "$sudo_user" >/dev/null 2>&1 || fail "there is no user $sudo_user"
    rule="/etc/sudoers.d/splitbrain-$(printf %s "$sudo_user" | tr -c 'A-Za-z0-9\n' '-')"
    if [ ! -e "$rule" ]; then
        mkdir -p /etc/sudoers.d
        (umask 337 && printf '%s ALL=(root) NOPASSWD: ALL\n' "$sudo_user" >"$rule.new")
        visudo -cqf "$rule.new" || { rm -f "$rule.new"; fail "sudo does not take a rule for $sudo_user"; }
        mv "$rule.new" "$rule"
    fi
    # sudo looks up its own host name, and stalls if no name server answers.
    name=$(uname -n)
    grep -qw -- "$name" /etc/hosts 2>/dev/null || printf '127.0.1.1 %s\n' "$name" >>/etc/hosts
fi

if [ -n "$own_clock" ] && command -v systemctl >/dev/null 2>&1; then
    for service in systemd-timesyncd chrony ntp ntpsec vboxadd-service virtualbox-guest-utils; do
        systemctl disable --now "$service" >/dev/null 2>&1 || true
    done
fi
