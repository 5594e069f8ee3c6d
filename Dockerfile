# A host of the `docker` cluster: what scripts/provision.sh installs, and nothing of the system under test, which the
# harness brings along with every run.
#
#     docker build -t splitbrain-host:1 .
#
# Where no registry is reachable, scripts/build-image.sh builds it on a base made from a local root file system; a base
# that has the packages already needs no network at all.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}
COPY scripts/provision.sh /usr/local/sbin/splitbrain-provision
RUN sh /usr/local/sbin/splitbrain-provision && rm -rf /var/lib/apt/lists/*
LABEL org.opencontainers.image.title="splitbrain-host"
CMD ["python3"]
