# The image of mps-exporter: one binary, on a base with glibc, for NVML is opened at run time.
#
#   docker build -t mps-exporter .
#   docker build -t mps-exporter --build-arg BASE=debian:12-slim .       a base with a shell
#   docker build -t mps-exporter --build-arg PROFILE=release .           quicker to build, and a larger binary
#
# By podman and buildah with --format docker, for the format that they prefer has no health check.
#
# It runs as nobody in particular: that serves the demo. To watch a node it needs what docs/deploy.md shows:
#
#   docker run --rm -p 127.0.0.1:10055:10055 mps-exporter demo --web.listen-address=0.0.0.0:10055
ARG RUST=1.95.0
ARG BASE=gcr.io/distroless/cc-debian12:nonroot

FROM rust:${RUST}-bookworm AS build
ARG AUDITABLE=0.7.7
# The list of dependencies goes into the binary, where scanners of images find it.
RUN cargo install --locked --version "${AUDITABLE}" cargo-auditable
WORKDIR /source
COPY . .
ARG PROFILE=dist
ARG REVISION=
RUN MPS_EXPORTER_REVISION="${REVISION}" cargo auditable build --locked --profile "${PROFILE}" --bin mps-exporter \
 && install -D -m 0755 "target/${PROFILE}/mps-exporter" /image/usr/bin/mps-exporter \
 && install -D -m 0644 LICENSE /image/usr/share/doc/mps-exporter/LICENSE \
 && install -d -m 0750 -o 65532 -g 65532 /image/var/lib/mps-exporter

# hadolint ignore=DL3006
FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="mps-exporter" \
      org.opencontainers.image.description="Prometheus exporter and alerting sidecar for NVIDIA MPS fault domains" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /image/ /
# For the NVIDIA container runtime: every GPU, and of the driver NVML alone.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
USER 65532:65532
EXPOSE 10055
HEALTHCHECK --interval=30s --timeout=10s --start-period=5s --retries=3 CMD ["/usr/bin/mps-exporter", "healthcheck"]
ENTRYPOINT ["/usr/bin/mps-exporter"]
