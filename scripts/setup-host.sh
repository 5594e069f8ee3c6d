#!/bin/sh
# Install what the `netns` cluster needs on this host: the packages nftables and iproute2.
#
# Installs missing packages, and reports it, if run as root on a host with apt; otherwise prints one line with what is
# missing. Never fails: without them runs use the `local` cluster. Running it again does nothing.
set -u

PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

missing() {
    command -v ip >/dev/null 2>&1 || printf 'iproute2 '
    command -v nft >/dev/null 2>&1 || printf 'nftables '
}

# Unresponsive mirrors must not delay the run; wait for another apt that holds the lock.
apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@" </dev/null >/dev/null 2>&1
}

packages=$(missing)
[ -n "$packages" ] || exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup-host: installing the Debian packages ${packages% }, for clusters in network namespaces"
    # Package lists may be stale or absent: try the present ones before fetching new ones.
    # shellcheck disable=SC2086 # two words are two packages
    apt install --yes --no-install-recommends $packages ||
        { apt update && apt install --yes --no-install-recommends $packages; }
    packages=$(missing)
    [ -n "$packages" ] || exit 0
    echo "setup-host: could not install ${packages% }; the netns cluster will not be available" >&2
else
    echo "setup-host: ${packages% } missing (as root: install them with the package manager);" \
        "the netns cluster will not be available" >&2
fi
exit 0
