#!/bin/sh
# Build the image of the `docker` cluster's hosts, even if no registry is reachable.
#
#     build-image.sh                        from debian:bookworm-slim, or $BASE_IMAGE
#     build-image.sh --rootfs PATH          from a root file system: a directory, or a tar of one
#     build-image.sh --debootstrap [MIRROR] from a root file system that debootstrap makes (as root; about a minute)
#
# A root file system that has the packages of provision.sh, as debootstrap's does, needs no network in the build.
set -eu

IMAGE=splitbrain-host:1
BASE=splitbrain-base:1
PACKAGES=python3,nftables,iproute2,procps,e2fsprogs,mount,util-linux
project=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "build-image: $*" >&2
    exit 1
}

import_directory() {
    tar -C "$1" --one-file-system --exclude=./proc/* --exclude=./sys/* --exclude=./var/cache/apt/archives/*.deb \
        -cf - . | docker import - "$BASE" >/dev/null
}

command -v docker >/dev/null 2>&1 || fail "docker is not installed (apt-get install docker.io)"
docker version >/dev/null 2>&1 || fail "no Docker engine answers: start it (systemctl start docker), or set DOCKER_HOST"

case ${1-} in
    "") base=${BASE_IMAGE:-debian:bookworm-slim} ;;
    --rootfs)
        [ $# -eq 2 ] || fail "--rootfs needs a directory or a tar"
        base=$BASE
        if [ -d "$2" ]; then
            [ -e "$2/bin/sh" ] || fail "$2 is no root file system: it has no bin/sh"
            import_directory "$2"
        elif [ -f "$2" ]; then
            docker import "$2" "$BASE" >/dev/null
        else
            fail "there is no $2"
        fi
        ;;
    --debootstrap)
        [ "$(id -u)" -eq 0 ] || fail "debootstrap must run as root"
        command -v debootstrap >/dev/null 2>&1 || fail "debootstrap is not installed (apt-get install debootstrap)"
        base=$BASE
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        trap 'exit 130' INT TERM
        debootstrap --variant=minbase --include="$PACKAGES" bookworm "$work/root" \
            "${2:-http://deb.debian.org/debian}" >"$work/log" 2>&1 || { tail -n 5 "$work/log" >&2; fail "debootstrap failed"; }
        import_directory "$work/root"
        ;;
    *) fail "unknown option $1; known: --rootfs PATH, --debootstrap [MIRROR]" ;;
esac

# The classic builder works with every engine, even without the BuildKit component.
DOCKER_BUILDKIT=0 docker build -q -t "$IMAGE" --build-arg "BASE_IMAGE=$base" "$project" >/dev/null ||
    fail "the image could not be built on $base"
echo "$IMAGE"
